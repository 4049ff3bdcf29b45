"""Rounds of attacks within a time limit. Results are complete after every round."""

from __future__ import annotations

import asyncio
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from torture.attacks import ATTACKS
from torture.context import attack_context

#: Approximate duration of a round. Some attacks end earlier.
ROUND_SECONDS = 4.0
#: Timeout of a round, which then counts as broken.
ROUND_TIMEOUT = 180.0


@dataclass
class AttackResult:
    """Results of an attack on an engine."""

    name: str
    engine: str
    rounds: int = 0
    figures: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)
    """Tracebacks of violated guarantees, with the seed of the round."""


def targets(names: Iterable[str] = ()) -> list[AttackResult]:
    """Return empty results for each attack and engine, optionally only for some attacks."""
    return [
        AttackResult(name, engine)
        for name, attack in ATTACKS.items()
        if name in (names or ATTACKS)
        for engine in attack.ENGINES
    ]


async def one_round(
    result: AttackResult, server_url: str, folder: Path, seed: str, seconds: float
) -> None:
    """Run one round of an attack. Errors are added to the results, not raised."""
    async with attack_context(result.engine, server_url, folder, seed, seconds) as context:
        try:
            async with asyncio.timeout(ROUND_TIMEOUT):
                await ATTACKS[result.name].attack(context)
        except Exception:
            result.broken.append(f"seed {seed}\n{traceback.format_exc()}")
        result.figures += context.figures
        result.rounds += 1


def run(
    results: list[AttackResult],
    server_url: str,
    folder: Path,
    *,
    seed: int,
    seconds: float,
    on_round: Callable[[AttackResult], None],
) -> None:
    """Run all attacks, each for the same time and for at least one round.

    Args:
        results: The attacks to run. Their results are updated.
        server_url: URL of a PostgreSQL server.
        folder: Folder for files of attacks.
        seed: Seed of all random choices.
        seconds: Total time.
        on_round: Called before each round, and after the last one of an attack.
    """
    end = time.monotonic() + seconds
    for done, result in enumerate(results):
        own_end = time.monotonic() + (end - time.monotonic()) / (len(results) - done)
        while not result.rounds or time.monotonic() + ROUND_SECONDS < own_end:
            on_round(result)
            length = max(1.0, min(ROUND_SECONDS, own_end - time.monotonic()))
            name = f"{seed}/{result.name}/{result.engine}/{result.rounds}"
            asyncio.run(one_round(result, server_url, folder, name, length))
        on_round(result)
