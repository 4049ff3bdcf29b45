"""`replaydb verify`, as people and scripts call it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from sqlalchemy import update

from operations.conftest import live
from replaydb.database.schema import task
from support.command import json_of, run
from support.connections import transaction
from support.damage import damage
from support.engines import both_engines


async def change(url: str, statement: Any) -> None:
    async with transaction(url) as connection:
        await connection.execute(statement)


@pytest.fixture
def lived(url: str) -> str:
    """A store with something of everything."""
    asyncio.run(live(url))
    return url


@both_engines
def test_it_says_what_is_wrong(lived: str) -> None:
    sound = run("verify", url=lived)
    assert sound.exit_code == 0, sound.output
    assert sound.output == "50 groups, 50 payloads (82.7 kB) read: nothing is wrong\n"
    asyncio.run(change(lived, update(task).values(num_pending=5)))
    wrong = run("verify", url=lived)
    assert wrong.exit_code == 1
    assert "task 'gsm8k' of buffer 'math'   num_pending is 5, should be 1" in wrong.output
    assert wrong.output.endswith("read: 3 problems\n")
    repaired = run("verify", "--repair", url=lived)
    assert repaired.exit_code == 0, repaired.output
    assert repaired.output.endswith("read: 3 problems, 3 of them repaired\n")
    assert json_of("verify", url=lived)["num_problems"] == 0


def test_what_can_not_be_repaired_stays_an_error(lived: str) -> None:
    asyncio.run(damage(lived, 3))
    found = run("verify", "--repair", "--json", url=lived)
    assert found.exit_code == 1
    [problem] = json.loads(found.stdout)["problems"]
    assert problem.pop("what").startswith("checksum is ")
    assert problem == {"kind": "payload", "where": "group 3, part 0", "is_repaired": False}
