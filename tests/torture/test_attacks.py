"""A minute of `make torture`: one short round of every attack on every engine."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from support.postgres import PostgresServer
from torture.arena import arena
from torture.attacks import ATTACKS, promise_of

ROUND_SECONDS = 1.0


@pytest.mark.parametrize(
    ("name", "engine"),
    [(name, engine) for name, attack in ATTACKS.items() for engine in attack.ENGINES],
)
async def test_attack(name: str, engine: str, postgres: PostgresServer, tmp_path: Path) -> None:
    seed = str(random.randrange(10**6))
    print(f"seed {seed}")
    async with arena(engine, postgres.url, tmp_path, seed, ROUND_SECONDS) as ground:
        await ATTACKS[name].attack(ground)
    assert ground.figures, "nothing was attacked"


def test_every_attack_names_its_promise() -> None:
    for name, attack in ATTACKS.items():
        assert promise_of(attack).endswith("."), name
        assert attack.PROMISES, name
