"""Attacks, one module each. The first line of its docstring is the guarantee that it attacks."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Protocol

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
    judges,
    kills,
    network,
    packs,
    power,
    server_disk,
    servers,
    trajectories,
)
from torture.context import AttackContext


class Attack(Protocol):
    """The interface of an attack module."""

    @property
    def PROMISES(self) -> tuple[int, ...]:
        """Numbers of the attacked sections of docs/consistency.md."""

    @property
    def ENGINES(self) -> tuple[str, ...]:
        """Names of the engines on which it runs."""

    def attack(self, context: AttackContext) -> Awaitable[None]:
        """Run one round. Raises AssertionError if a guarantee is violated."""


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
    "trajectories": trajectories,
    "judges": judges,
}


def promise_of(attack: Attack) -> str:
    """Return the first line of the docstring of an attack."""
    return (attack.__doc__ or "").partition("\n")[0]
