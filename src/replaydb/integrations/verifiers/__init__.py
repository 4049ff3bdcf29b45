"""Conversion of verifiers' traces to episodes, and back, bit for bit.

It does not import the package verifiers: it converts the objects and records that it is given. See
`docs/integrations/verifiers.md`.
"""

from replaydb.integrations.verifiers.traces import from_trace, to_trace

__all__ = ["from_trace", "to_trace"]
