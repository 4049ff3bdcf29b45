"""`replaydb verify`: output, JSON and exit codes."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from sqlalchemy import update

from operations.conftest import populate
from replaydb.database.tables.schema import task
from support.command import json_of, run
from support.connections import transaction
from support.damage import damage


async def change(url: str, statement: Any) -> None:
    async with transaction(url) as connection:
        await connection.execute(statement)


@pytest.fixture
def populated(url: str) -> str:
    """A store with rows in every table."""
    asyncio.run(populate(url))
    return url


def test_problems_are_reported_and_repaired(populated: str) -> None:
    sound = run("verify", url=populated)
    assert sound.exit_code == 0, sound.output
    assert sound.output == "checked 50 groups, 50 payloads (45 kB): no problems\n"
    asyncio.run(change(populated, update(task).values(num_pending=5)))
    wrong = run("verify", url=populated)
    assert wrong.exit_code == 1
    assert "task 'gsm8k' of buffer 'math'   num_pending is 5, expected 1" in wrong.output
    assert wrong.output.endswith("(45 kB): 3 problems\n")
    repaired = run("verify", "--repair", url=populated)
    assert repaired.exit_code == 0, repaired.output
    assert repaired.output.endswith("(45 kB): 3 problems, 3 repaired\n")
    assert json_of("verify", url=populated)["num_problems"] == 0


def test_an_unrepaired_problem_is_an_error(populated: str) -> None:
    asyncio.run(damage(populated, 3))
    found = run("verify", "--repair", "--json", url=populated)
    assert found.exit_code == 1
    [problem] = json.loads(found.stdout)["problems"]
    assert problem.pop("what").startswith("checksum is ")
    assert problem == {"kind": "payload", "where": "group 3, part 0", "is_repaired": False}
