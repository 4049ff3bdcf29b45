"""One short round of every attack of `make torture`, each on one of its engines."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from support.postgres import PostgresServer
from torture.attacks import ATTACKS, promise_of
from torture.context import attack_context

ROUND_SECONDS = 0.5
#: Run only by `make test-all`, as other tests detect the same faults: `operations/test_copy.py`,
#: `database/test_failover.py`, `blocking/test_interrupts.py`.
NIGHTLY = {"copies", "failovers", "interrupts"}


def rounds() -> Iterator[Any]:
    """Yield every attack and engine. With two engines, one of them is for `make test-all`."""
    left = cycle(("postgresql", "sqlite"))
    for name, attack in ATTACKS.items():
        nightly = next(left) if len(attack.ENGINES) > 1 else None
        if name == "cancellations":
            nightly = "sqlite"  # whose transactions have no awaits
        for engine in attack.ENGINES:
            marks = pytest.mark.nightly if name in NIGHTLY or engine == nightly else ()
            yield pytest.param(name, engine, marks=marks)


@pytest.mark.parametrize(("name", "engine"), list(rounds()))
async def test_attack(name: str, engine: str, postgres: PostgresServer, tmp_path: Path) -> None:
    seed = str(random.randrange(10**6))
    print(f"seed {seed}")
    async with attack_context(engine, postgres.url, tmp_path, seed, ROUND_SECONDS) as context:
        await ATTACKS[name].attack(context)
    assert context.figures, "nothing was attacked"


def test_every_attack_names_its_guarantee() -> None:
    for name, attack in ATTACKS.items():
        assert promise_of(attack).endswith("."), name
        assert attack.PROMISES, name
