"""The version of this package, and comparison of versions."""

from __future__ import annotations

import math
import re

#: As in `pyproject.toml`.
VERSION = "0.1.0"


def numbers(version: str) -> tuple[float, ...]:
    """Return the numbers of a release, as of 1.2.0rc1; more than any release for other text."""
    found = re.match(r"\d{1,9}(\.\d{1,9})*", str(version))
    return tuple(map(int, found[0].split("."))) if found else (math.inf,)
