"""torchtitan, on a machine without a GPU."""

from __future__ import annotations

import integrations.torchtitan.package  # noqa: F401  # before any of `torchtitan.experiments.rl`
