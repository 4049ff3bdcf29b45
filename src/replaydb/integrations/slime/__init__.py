"""Conversion of slime's samples to groups, and back, bit for bit.

It imports neither slime nor, unless samples have tensors, torch: it converts the objects and dicts
that it is given. See `docs/integrations/slime.md`.
"""

from replaydb.integrations.slime.groups import from_samples, to_samples

__all__ = ["from_samples", "to_samples"]
