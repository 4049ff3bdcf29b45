"""Rounds of attacks, until the time is over; whatever is interrupted tells what it knows."""

from __future__ import annotations

import asyncio
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from torture.arena import arena
from torture.attacks import ATTACKS

#: About how long a round goes on; those that end by themselves may be shorter.
ROUND_SECONDS = 4.0
#: A round that takes longer hangs, and so is broken.
LONGEST_ROUND = 180.0


@dataclass
class Verdict:
    """What became of an attack on an engine."""

    name: str
    engine: str
    rounds: int = 0
    figures: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)
    """What did not hold, with the seed of its round."""


def targets(names: Iterable[str] = ()) -> list[Verdict]:
    """Every attack on every engine it is for."""
    return [
        Verdict(name, engine)
        for name, attack in ATTACKS.items()
        if name in (names or ATTACKS)
        for engine in attack.ENGINES
    ]


async def one_round(
    verdict: Verdict, server_url: str, folder: Path, seed: str, seconds: float
) -> None:
    """Attack once more. What does not hold is noted, not raised."""
    async with arena(verdict.engine, server_url, folder, seed, seconds) as ground:
        try:
            async with asyncio.timeout(LONGEST_ROUND):
                await ATTACKS[verdict.name].attack(ground)
        except Exception:
            verdict.broken.append(f"seed {seed}\n{traceback.format_exc()}")
        verdict.figures += ground.figures
        verdict.rounds += 1


def run(
    verdicts: list[Verdict],
    server_url: str,
    folder: Path,
    *,
    seed: int,
    seconds: float,
    tell: Callable[[Verdict], None],
) -> None:
    """Share the time evenly; each gets one round at least."""
    end = time.monotonic() + seconds
    for done, verdict in enumerate(verdicts):
        mine = time.monotonic() + (end - time.monotonic()) / (len(verdicts) - done)
        while not verdict.rounds or time.monotonic() + ROUND_SECONDS < mine:
            tell(verdict)
            length = max(1.0, min(ROUND_SECONDS, mine - time.monotonic()))
            name = f"{seed}/{verdict.name}/{verdict.engine}/{verdict.rounds}"
            asyncio.run(one_round(verdict, server_url, folder, name, length))
        tell(verdict)
