"""The integrations are tested with the packages that they are for: `make integrations`."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Warnings of other packages are theirs; those of replaydb fail the test, as everywhere."""
    config.addinivalue_line("filterwarnings", "default")
    config.addinivalue_line("filterwarnings", r"error:::replaydb(\.|$)")
