"""Clients of the previous and the next release on one store, while it is upgraded and downgraded.

`docs/compatibility.md` says what they may expect. `clients.py` has the releases, and `program.py`
what their processes do.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from sqlalchemy import MetaData, Table, select

from compatibility.clients import (
    ADDITIVE,
    BREAKING,
    NEXT_FORMAT,
    PREVIOUS_FORMAT,
    Client,
    Outcome,
    Process,
)
from support.connections import transaction
from support.engines import postgresql_nightly

Rows = dict[str, list[str]]
TOO_OLD = "ClientTooOldError: the store needs replaydb {} or later"
#: Calls of `program.py` that write nothing.
READS = {
    *("buffer", "get", "peek", "find", "episodes", "count", "stats", "draws", "redraw", "cursor"),
    *("buffers", "runs"),
}


async def rows_of(url: str) -> Rows:
    """Return all rows of all tables, also of those that this version does not know."""
    async with transaction(url) as connection:
        found = MetaData()
        await connection.run_sync(found.reflect)
        return {
            name: sorted(map(repr, (await connection.execute(select(table))).all()))
            for name, table in found.tables.items()
        }


async def formats(url: str) -> set[int]:
    """Return the payload formats in which payloads are stored."""
    return set(await column(url, "payload", "codec_version"))


async def column(url: str, table: str, *names: str) -> list[Any]:
    """Return columns of all rows of a table."""
    async with transaction(url) as connection:
        found = await connection.run_sync(lambda core: Table(table, MetaData(), autoload_with=core))
        rows = (await connection.execute(select(*(found.c[name] for name in names)))).all()
        return [row[0] if len(names) == 1 else tuple(row) for row in rows]


@asynccontextmanager
async def calling(client: Client, url: str) -> AsyncIterator[Process]:
    """Run a process that has a lease, and then makes calls when it is asked."""
    async with client.process("calls", url) as process:
        assert (await process.read())["leased"]
        yield process


async def finished(process: Process) -> dict[str, Any]:
    """Stop the traffic of a process; return what it has put and acked."""
    result = await process.ask("stop")
    assert await process.ended() == Outcome(0, "")
    return result


async def check_nothing_lost(url: str, client: Client, *results: dict[str, Any]) -> None:
    """Check that every put is stored once and every ack archived once, and verify the store."""
    put = [uid for result in results for uid in result["put"]]
    acked = [uid for result in results for uid in result["acked"]]
    assert put
    assert acked
    rows = await column(url, "episode_group", "group_uid", "group_status")
    assert sorted(uid for uid, _ in rows) == sorted(put)
    assert sorted(uid for uid, status in rows if status == "archived") == sorted(acked)
    assert {status for _, status in rows} <= {"archived", "completed", "pending", "leased"}
    outcome = await client.run("verify", "--url", url)
    assert outcome.code == 0, outcome.output


async def succeeded(client: Client, *words: str) -> str:
    outcome = await client.run(*words)
    assert outcome.code == 0, outcome.output
    return outcome.output


@postgresql_nightly
async def test_an_additive_upgrade_and_downgrade_under_traffic(
    old_url: str, previous: Client, additive: Client
) -> None:
    """Old clients notice nothing. New ones need the tables of their release."""
    revision = await succeeded(previous, "db", "current", "--url", old_url)
    async with AsyncExitStack() as stack:
        old = await stack.enter_async_context(previous.process("traffic", old_url, "old"))
        assert (await old.ask("progress"))["errors"] == {}
        await succeeded(additive, "db", "upgrade", "--url", old_url)
        assert (await old.ask("progress"))["errors"] == {}

        new = await stack.enter_async_context(additive.process("traffic", old_url, "new"))
        late = await stack.enter_async_context(previous.process("traffic", old_url, "late"))
        for one in (new, late, old, new):
            assert (await one.ask("progress"))["errors"] == {}
        assert await formats(old_url) == {PREVIOUS_FORMAT}

        await succeeded(additive, "db", "downgrade", revision, "--yes", "--url", old_url)
        for one in (old, late):
            assert (await one.ask("progress"))["errors"] == {}
        results = [await finished(one) for one in (old, late, new)]
    assert [result["errors"] for result in results[:2]] == [{}, {}]
    assert {text.partition(":")[0] for text in results[2]["errors"].values()} <= {
        "SchemaOutOfDateError"
    }
    await check_nothing_lost(old_url, previous, *results)


@pytest.mark.nightly
async def test_a_breaking_upgrade_under_traffic(
    old_url: str, previous: Client, breaking: Client
) -> None:
    """Old clients are stopped at their next call. New ones continue."""
    async with AsyncExitStack() as stack:
        old = await stack.enter_async_context(previous.process("traffic", old_url, "old"))
        assert (await old.ask("progress"))["errors"] == {}
        await succeeded(breaking, "db", "upgrade", "--yes", "--url", old_url)
        new = await stack.enter_async_context(breaking.process("traffic", old_url, "new"))
        for _ in range(2):
            assert (await new.ask("progress"))["errors"] == {}
        results = [await finished(one) for one in (old, new)]
    errors = results[0]["errors"]
    assert errors.keys() == {"produce", "consume"}
    assert all(text.startswith(TOO_OLD.format(BREAKING)) for text in errors.values()), errors
    assert results[1]["errors"] == {}
    await check_nothing_lost(old_url, breaking, *results)


async def test_old_clients_write_nothing_after_a_breaking_upgrade(
    old_url: str, engine_name: str, previous: Client, breaking: Client
) -> None:
    upgrade = ("db", "upgrade", "--url", old_url)
    async with calling(previous, old_url) as old, previous.process("unused", old_url) as unused:
        await unused.read()
        before = await rows_of(old_url)
        if engine_name == "postgresql":
            outcome = await breaking.run(*upgrade)
            assert outcome.code == 1
            assert f"clients older than {BREAKING}" in outcome.output
            assert f"replaydb {previous.version}: user" in outcome.output
            assert await rows_of(old_url) == before
        await succeeded(breaking, *upgrade, "--yes")
        before = await rows_of(old_url)
        check_refused(await unused.ask("put"), BREAKING)
        check_refused(await old.ask("all"), BREAKING)
        assert await rows_of(old_url) == before
        async with previous.process("traffic", old_url, "late") as late:
            assert TOO_OLD.format(BREAKING) in (await late.ended()).output
    assert await rows_of(old_url) == before


def check_refused(errors: dict[str, str | None], needed: str) -> None:
    """Check that all writes of an old client were refused, and reads refused or answered."""
    for call, text in errors.items():
        if call not in READS:
            assert text is not None, call
            assert text.startswith(TOO_OLD.format(needed))
        assert text is None or text.startswith("ClientTooOldError: "), text


async def test_a_payload_format(
    old_url: str, engine_name: str, previous: Client, additive: Client
) -> None:
    """Old clients read what new ones write, until `write-format` stops them."""
    write_format = ("db", "write-format", str(NEXT_FORMAT), "--url", old_url)
    async with calling(previous, old_url) as old:
        await succeeded(additive, "db", "upgrade", "--url", old_url)
        async with calling(additive, old_url) as new:
            assert await new.ask("put") == {"put": None}
            assert await formats(old_url) == {PREVIOUS_FORMAT}
            assert await old.ask("get put sample") == {"get": None, "put": None, "sample": None}

            before = await rows_of(old_url)
            if engine_name == "postgresql":
                outcome = await additive.run(*write_format)
                assert outcome.code == 1
                assert f"replaydb {previous.version}: user" in outcome.output
                assert await rows_of(old_url) == before
            await succeeded(additive, *write_format, "--yes")
            # Encoded for the former format, which all that may use the store can read.
            assert await new.ask("get put sample") == {"get": None, "put": None, "sample": None}
            assert await new.ask("put") == {"put": None}
            assert await formats(old_url) == {PREVIOUS_FORMAT, NEXT_FORMAT}

            before = await rows_of(old_url)
            check_refused(await old.ask("all"), ADDITIVE)
            async with previous.process("traffic", old_url, "late") as late:
                assert TOO_OLD.format(ADDITIVE) in (await late.ended()).output
            assert await rows_of(old_url) == before
            more = ("get", "peek", "lease", "ack")
            assert await new.ask(" ".join(more)) == dict.fromkeys(more)


@postgresql_nightly
async def test_a_downgrade_that_would_leave_payloads_unreadable(
    old_url: str, previous: Client, additive: Client
) -> None:
    """It is refused, and a put that was encoded before a downgrade is refused after it."""
    revision = await succeeded(previous, "db", "current", "--url", old_url)
    downgrade = ("db", "downgrade", revision, "--yes", "--url", old_url)
    await succeeded(additive, "db", "upgrade", "--url", old_url)
    await succeeded(additive, "db", "write-format", str(NEXT_FORMAT), "--url", old_url)
    async with calling(additive, old_url) as new:
        assert await formats(old_url) == {NEXT_FORMAT}
        before = await rows_of(old_url)
        check_message(await additive.run(*downgrade), "have payloads of a later format")
        assert await rows_of(old_url) == before

        assert await new.ask("empty") == {"empty": None}
        await succeeded(additive, *downgrade)
        before = await rows_of(old_url)
        (refusal,) = (await new.ask("put")).values()
        assert refusal is not None
        assert refusal.startswith("SchemaOutOfDateError")
        assert await rows_of(old_url) == before
        await succeeded(additive, "db", "upgrade", "--url", old_url)
        before = await rows_of(old_url)
        (refusal,) = (await new.ask("put")).values()
        assert refusal is not None
        assert "downgraded to payload format" in refusal
        assert await rows_of(old_url) == before
        assert await new.ask("put") == {"put": None}
    assert await formats(old_url) == {PREVIOUS_FORMAT}


def check_message(outcome: Outcome, expected: str) -> None:
    """Check that a command failed with one message."""
    assert outcome.code == 1
    assert expected in outcome.output
    assert outcome.output.startswith("error: ")
    assert len(outcome.output.splitlines()) == 1
