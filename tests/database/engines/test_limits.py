"""Time limits that are set for a PostgreSQL role or database."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

import pytest
from sqlalchemy import func, select, text

import replaydb as rdb
from replaydb import Store
from replaydb.database.engines import backend_for
from replaydb.database.postgresql import limits, transactions
from replaydb.database.runtime.session import Session
from replaydb.database.runtime.transactions import end_in
from support.connections import transaction
from support.groups import group
from support.in_transaction import await_in_transaction


async def limit(url: str, setting: str, value: str) -> None:
    """Set a limit for every new session of a database that no other test uses."""
    name = urlsplit(url).path.removeprefix("/")
    async with transaction(url) as connection:
        await connection.execute(text(f"ALTER DATABASE \"{name}\" SET {setting} = '{value}'"))


@pytest.mark.parametrize("setting", ["statement_timeout", "transaction_timeout"])
async def test_time_limits_do_not_apply_to_migrations(
    empty_postgresql_url: str, setting: str
) -> None:
    await limit(empty_postgresql_url, setting, "400ms")
    await backend_for(empty_postgresql_url).schema.change(
        lambda session: session.run(select(func.pg_sleep(0.6)))
    )


async def test_an_error_names_statement_timeout(own_postgresql_url: str) -> None:
    await limit(own_postgresql_url, "statement_timeout", "300ms")
    async with Store.open(own_postgresql_url) as store:
        buffer = await store.buffer("math")
        async with transaction(own_postgresql_url) as connection:
            await connection.execute(text("SELECT id FROM buffer FOR UPDATE"))
            with pytest.raises(
                rdb.DatabaseUnavailableError, match=r"57014.* statement_timeout .*ALTER ROLE"
            ):
                await buffer.put(group())


async def test_an_error_of_opening_names_statement_timeout(own_postgresql_url: str) -> None:
    loop = asyncio.get_running_loop()

    async def opened() -> None:
        await limit(own_postgresql_url, "statement_timeout", "300ms")
        with pytest.raises(rdb.DatabaseUnavailableError, match=r"statement_timeout .*ALTER ROLE"):
            await Store.open(own_postgresql_url, run="a")

    await backend_for(own_postgresql_url).schema.change(
        lambda _: await_in_transaction(opened(), loop)
    )


async def test_an_error_names_lock_timeout(empty_postgresql_url: str) -> None:
    schema, loop = backend_for(empty_postgresql_url).schema, asyncio.get_running_loop()

    async def changed() -> None:
        await limit(empty_postgresql_url, "lock_timeout", "50ms")
        with pytest.raises(
            rdb.DatabaseUnavailableError, match=r"55P03.* lock_timeout .*ALTER ROLE"
        ):
            await schema.change(lambda _: None)

    await schema.change(lambda _: await_in_transaction(changed(), loop))


async def test_a_call_may_wait_longer_than_lock_timeout(
    own_postgresql_url: str,
) -> None:
    await limit(own_postgresql_url, "lock_timeout", "50ms")
    async with Store.open(own_postgresql_url) as store:
        buffer = await store.buffer("math")
        async with transaction(own_postgresql_url) as connection:
            await connection.execute(text("SELECT id FROM buffer FOR UPDATE"))
            putting = asyncio.create_task(buffer.put(group("late")))
            await asyncio.sleep(0.3)
        await putting
        assert [one.group_uid for one in await buffer.find()] == ["late"]


async def test_a_long_call_on_a_used_connection(
    postgresql_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sets limits of its own, in place of those of the session, after which it is run again."""
    runs = 0

    monkeypatch.setattr(transactions, "ORDINARY_SECONDS", 60.0)
    monkeypatch.setattr(limits, "ORDINARY_SECONDS", 0.5)
    monkeypatch.setattr(limits, "SERVER_GRACE_SECONDS", 0.1)

    def sleep(session: Session) -> object:
        nonlocal runs
        runs += 1
        return session.run(select(func.pg_sleep(1.5)))

    async with Store.open(postgresql_url, run="a") as store:
        for call in (store._database.read, store._database.write):
            await call(lambda it: it.run(select(1)), end=end_in(100))  # connects
            await call(lambda it: it.run(select(1)), end=end_in(50))
            await call(sleep, end=end_in(100))
    assert runs == 2


async def test_a_long_read_of_one_statement(
    postgresql_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs without a transaction, until the limits of the session end it."""
    for module in (transactions, limits):
        monkeypatch.setattr(module, "ORDINARY_SECONDS", 0.5)
    monkeypatch.setattr(limits, "SERVER_GRACE_SECONDS", 0.1)
    found = []

    def sleep(session: Session) -> object:
        found.append(session.core.get_isolation_level())
        return session.run(select(func.pg_sleep(1.5)))

    async with Store.open(postgresql_url, run="a") as store:
        await store._database.read(sleep, end=end_in(20), single=True)
    assert found == ["READ COMMITTED", "REPEATABLE READ"]


async def test_limits_that_the_server_refuses(
    postgresql_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection is used again."""
    async with Store.open(postgresql_url, run="a") as store:
        buffer = await store.buffer("math")
        with monkeypatch.context() as patch:
            refused = "SELECT set_config('transaction_timeout', 'never', true)"
            patch.setattr(limits, "_text", lambda *_: refused)
            with pytest.raises(rdb.DatabaseError, match="22023"):
                await buffer.find()
        assert await buffer.find() == []


@pytest.mark.parametrize("timeout", [1e7, None])
async def test_a_timeout_beyond_the_limits_of_the_server(
    postgresql_url: str, timeout: float | None
) -> None:
    async with Store.open(postgresql_url, run="a") as store:
        buffer = await store.buffer("math")
        await buffer.put(group(), timeout=timeout)
        assert len(await buffer.sample(1, timeout=timeout)) == 1
