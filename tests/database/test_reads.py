"""Statements that are read together, in one statement on PostgreSQL."""

from __future__ import annotations

from typing import Any

import pytest

from replaydb import Buffer, Store
from replaydb.database.repository.groups import select_facts, select_totals, select_transcripts
from replaydb.database.repository.metrics import sum_by_status, sum_last_draws
from replaydb.database.runtime.prepared import Bound
from replaydb.database.runtime.session import Session
from replaydb.database.statements.payload import select_payloads
from replaydb.database.statements.statistics import select_task_counters
from support.groups import conversation, group, groups
from support.watching import recorded

IDS = [6, 2, 7, 4]
READS: dict[str, list[Bound[Any]]] = {
    "statistics": [
        select_task_counters(1),
        select_totals(1),
        sum_last_draws(1, 100),
        sum_by_status(1, 100),
    ],
    "groups": [select_facts(1, IDS), select_payloads(IDS, None), select_transcripts(IDS)],
    "nothing": [select_facts(1, []), select_payloads([], None)],
}


@pytest.mark.parametrize("reads", READS.values(), ids=READS)
async def test_rows_equal_those_of_separate_statements(
    store: Store, buffer: Buffer, engine_name: str, reads: list[Bound[Any]]
) -> None:
    """In their order, and with the same names and types."""
    tags = {"level": [1, 2.5, None]}
    await buffer.put([*groups(3), *groups(2, "code"), group("tagged", tags=tags)])
    await buffer.open_group("gsm8k", "pieces", 1)
    await buffer.add_episode("pieces", conversation())
    await buffer.sample(5)

    def described(results: list[Any]) -> list[Any]:
        return [[repr(row._asdict()) for row in rows] for rows in results]

    with recorded(store) as statements:

        def watched(session: Session) -> list[Any]:
            statements.clear()
            together = session.read_together(reads)
            assert len(statements) == (1 if engine_name == "postgresql" else len(reads))
            return described(together)

        together = await store._database.write(watched)

    def work(session: Session) -> None:
        alone = described([session.run(read) for read in reads])
        assert together == alone
        for _ in range(2):  # the second run uses the compiled statement
            assert described(session.read_together(reads)) == alone

    await store._database.write(work)


async def test_the_same_statement_with_different_values(store: Store) -> None:
    for name in ("first", "second"):
        await (await store.buffer(name)).put(group(task=name))

    def work(session: Session) -> None:
        found = session.read_together([select_task_counters(2), select_task_counters(1)])
        assert [[row.task_name for row in rows] for rows in found] == [["second"], ["first"]]

    await store._database.write(work)
