"""SkyRL, on a machine without a GPU."""

from __future__ import annotations

import integrations.skyrl.package  # noqa: F401  # before any of `skyrl.train`
