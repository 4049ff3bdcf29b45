"""What became of what was drawn."""

from __future__ import annotations

from enum import StrEnum


class DrawOutcome(StrEnum):
    """What became of one group of one draw.

    Attributes:
        SAMPLED: It was handed out by `sample`, which asks nothing back: whether the step it was
            for survived is not known to the buffer.
        LEASED: Somebody holds it; the outcome is still to come.
        ACKED: Its holder said that it was used.
        NACKED: Its holder gave it back, or it never reached a holder.
        EXPIRED: Its lease ran out.
        REJECTED: Its holder refused it for good.
        LOST: It was deleted or replaced while it was held, or its stored bytes were damaged.
    """

    SAMPLED = "sampled"
    LEASED = "leased"
    ACKED = "acked"
    NACKED = "nacked"
    EXPIRED = "expired"
    REJECTED = "rejected"
    LOST = "lost"
