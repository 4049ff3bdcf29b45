"""Every attack there is: a module whose first line is the promise it attacks."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Protocol

from torture.arena import Arena
from torture.attacks import (
    buckets,
    cancellations,
    clocks,
    commits,
    copies,
    disk,
    failovers,
    files,
    flips,
    freezes,
    histories,
    hostile,
    interrupts,
    kills,
    network,
    packs,
    power,
    server_disk,
    servers,
)


class Attack(Protocol):
    """A module."""

    @property
    def PROMISES(self) -> tuple[int, ...]:
        """Numbers of the sections of docs/consistency.md."""

    @property
    def ENGINES(self) -> tuple[str, ...]:
        """Names of the engines it is for."""

    def attack(self, arena: Arena) -> Awaitable[None]:
        """One round. Raises AssertionError where the promise does not hold."""


ATTACKS: dict[str, Attack] = {
    "kills": kills,
    "servers": servers,
    "failovers": failovers,
    "network": network,
    "commits": commits,
    "freezes": freezes,
    "cancellations": cancellations,
    "interrupts": interrupts,
    "disk": disk,
    "power": power,
    "server_disk": server_disk,
    "buckets": buckets,
    "files": files,
    "flips": flips,
    "hostile": hostile,
    "histories": histories,
    "clocks": clocks,
    "copies": copies,
    "packs": packs,
}


def promise_of(attack: Attack) -> str:
    """The first line of its docstring."""
    return (attack.__doc__ or "").partition("\n")[0]
