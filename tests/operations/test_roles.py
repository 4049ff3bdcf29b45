"""Each role can do its work on a real server, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit
from uuid import uuid4

import pytest
from sqlalchemy import delete, insert, select, text, update
from sqlalchemy.exc import DBAPIError

import replaydb as rdb
from replaydb import Keep, Store, operations
from replaydb.database.tables.schema import buffer as buffer_table
from replaydb.database.tables.schema import (
    draw,
    draw_group,
    episode_group,
    metadata,
    pack,
    payload,
    policy_change,
)
from replaydb.database.tables.schema import run as run_table
from replaydb.database.tables.views import VIEWS
from support.agents import turn
from support.command import run
from support.connections import transaction
from support.groups import episode, group, groups
from support.invariants import number_of
from support.postgres import PostgresServer

Logins = Callable[[str], str]


@pytest.fixture
def login(postgres: PostgresServer, postgresql_url: str) -> Iterator[Logins]:
    """Return the URL of a user who is a member of one role."""
    prefix = f"t{uuid4().hex[:8]}"
    asyncio.run(operations.roles(postgresql_url, prefix=prefix, apply=True))
    names = [f"{prefix}_{ending}" for ending in ("writer", "trainer", "analyst")]
    users = {name: f"{name} \N{LATIN SMALL LETTER U WITH DIAERESIS}ser" for name in names}
    for name, user in users.items():
        postgres.execute(postgresql_url, f"CREATE ROLE \"{user}\" LOGIN PASSWORD 'secret'")
        postgres.execute(postgresql_url, f'GRANT "{name}" TO "{user}"')

    def url_of(ending: str) -> str:
        parts = urlsplit(postgresql_url)
        user = users[f"{prefix}_{ending}"].replace(" ", "%20").replace("ü", "%C3%BC")
        host = parts.netloc.rpartition("@")[2]
        return urlunsplit(parts._replace(netloc=f"{user}:secret@{host}"))

    yield url_of
    for name in (*users.values(), *names):
        postgres.execute(postgresql_url, f'DROP OWNED BY "{name}"')
        postgres.execute(postgresql_url, f'DROP ROLE "{name}"')


async def prepared(url: str) -> None:
    async with Store.open(url, run="owner") as store:
        buffer = await store.buffer(
            "math",
            capacity=rdb.Capacity(groups=20),
            keep_archived=Keep(count=4),
            keep_draws=Keep(count=4),
            max_staleness=3,
            indexed_tags=["level"],
        )
        await buffer.put(groups(3, "old", tags={"level": "hard"}), cursor={"data": 1})


async def counts(url: str) -> list[int]:
    """Return the numbers of groups, payloads and draws."""
    return [await number_of(url, table) for table in (episode_group, payload, draw)]


async def denied(url: str, *statements: Any) -> None:
    """Check that each statement is denied."""
    for statement in statements:
        with pytest.raises(DBAPIError, match="permission denied"):
            async with transaction(url) as connection:
                await connection.execute(statement)


async def refused(*calls: Awaitable[object]) -> None:
    for call in calls:
        match = "permission denied.*db roles.*--apply"
        with pytest.raises(rdb.DatabaseError, match=match) as caught:
            await call
        assert caught.value.__cause__ is not None


async def test_a_writer_puts(login: Logins, postgresql_url: str) -> None:
    await prepared(postgresql_url)
    async with Store.open(postgresql_url) as owner:
        math = await owner.buffer("math")
        async with math.lease(2, ttl=600):
            pass
        await math.sample(1)
        await math.lease(1, ttl=0.001)  # expired when the writer runs
    async with Store.open(login("writer"), run="rollouts") as store:
        buffer = await store.buffer("math", create=False)
        for task in ("code", "prose"):  # evicts, and trims archived groups
            await buffer.put(groups(15, task, tags={"level": "easy"}), cursor={"data": 2})
        await buffer.put(groups(2, "code", rewards=[0.5]), on_duplicate="replace")
        await buffer.put(groups(2, "code", rewards=[0.25]), on_duplicate="renew")
        await buffer.open_group("code", "slow", expected_episodes=2)
        for position in range(2):
            await buffer.add_episode("slow", episode(), position=position)
        [drawn] = await buffer.find(where=rdb.col.times_sampled > 0, limit=1)
        scores = [rdb.Annotation(uid, 0, reward=0.5) for uid in ("slow", drawn.group_uid)]
        await buffer.annotate(scores)
        await buffer.open_group("code", "agents", expected_episodes=2, min_episodes=1)
        for claim in await buffer.claim(2, ttl=60):
            await claim.append_turn(turn(f"call-{claim.positions[0]}"))
            if claim.positions == (0,):
                await claim.finish_episode(discarded=["call-0"])
            else:
                await claim.fail_episode("timeout")
        assert await buffer.cursor("data") == 2
        assert await buffer.admission(batch_size=1, max_staleness=0, timeout=0) == 0
        before = await counts(postgresql_url)
        assert all(before)
        await refused(
            buffer.sample(1),
            buffer.lease(1, ttl=60),
            buffer.advance_policy(1),
            buffer.update_settings(capacity=None),
            store.buffer("new"),
            operations.delete_buffer(store, "math"),
            operations.delete_run(store, "owner"),
        )
        assert await counts(postgresql_url) == before


async def test_a_trainer_draws_and_acks_and_advances(login: Logins, postgresql_url: str) -> None:
    await prepared(postgresql_url)
    async with Store.open(login("trainer"), run="trainer") as store:
        buffer = await store.buffer("math", create=False)
        for step in range(6):
            await buffer.sample(1, rdb.Prioritized(), step=step)
        async with buffer.lease(1, ttl=60) as lease:
            await lease.ack(cursor={"trainer": 1})
        await (await buffer.lease(1, ttl=60)).nack()
        await buffer.update_priorities([2, 3], [2.0, 3.0])
        await buffer.update([2], tags={"level": "seen"})
        await buffer.advance_policy(1)
        assert len(await buffer.draws()) <= 6
        before = await counts(postgresql_url)
        await refused(
            buffer.put(group()),
            buffer.open_group("code", "slow", expected_episodes=2),
            buffer.update_settings(max_staleness=None),
            store.buffer("new"),
            operations.delete_buffer(store, "math"),
            operations.delete_run(store, "owner"),
        )
        assert await counts(postgresql_url) == before
        with pytest.raises(rdb.DatabaseError, match="vacuum run: that takes the owner"):
            await operations.vacuum(login("trainer"))
    await denied(
        login("trainer"),
        update(draw).values(policy="theirs"),
        update(draw_group).values(weight=1.0),
        update(buffer_table).values(name="theirs"),
        delete(policy_change),
        insert(payload).values(group_id=1, part=9),
    )
    await denied(login("writer"), update(buffer_table).values(policy_version=9), delete(run_table))


async def test_writers_remove_packs(login: Logins, postgresql_url: str, tmp_path: Path) -> None:
    async with Store.open(postgresql_url, payloads=tmp_path.as_uri(), payload_grace=0.001) as owner:
        await (await owner.buffer("math")).put(groups(2))
    async with Store.open(login("writer")) as store:
        await (await store.buffer("math", create=False)).delete(statuses="completed")
        assert (await store.prune(dry_run=False)).num_marked == 1
    assert await number_of(postgresql_url, pack) == 0


async def test_an_analyst_reads(login: Logins, postgresql_url: str) -> None:
    await prepared(postgresql_url)
    async with Store.open(login("analyst"), read_only=True) as store:
        buffer = await store.buffer("math", create=False)
        assert await buffer.count() == 3
        assert len(await buffer.get([1, 2])) == 2
        assert (await buffer.stats()).num_groups == 3
    found = await operations.examine(login("analyst"))
    assert {"limits", "indexes", "clock", "payload store"} <= {one.subject for one in found}
    async with transaction(login("analyst")) as connection:
        for view in VIEWS:
            await connection.execute(select(view.table))
    async with Store.open(login("analyst")) as store:
        buffer = await store.buffer("math", create=False)
        await refused(
            buffer.put(group()), buffer.sample(1), buffer.delete([1]), buffer.advance_policy(1)
        )


async def test_an_analyst_copies_and_verifies(
    login: Logins, postgresql_url: str, empty_sqlite_url: str
) -> None:
    """Both read sequences; without the right to, `copy` raises and `verify` skips them."""
    await prepared(postgresql_url)
    async with Store.open(postgresql_url) as store:
        await (await store.buffer("math")).delete([3])
    reader = login("analyst")
    async with Store.open(reader, read_only=True) as store:
        assert (await operations.verify(store)).is_sound
    assert (await operations.copy(reader, empty_sqlite_url)).is_finished
    async with Store.open(empty_sqlite_url) as store:
        assert await (await store.buffer("math")).put(group("new")) == [4]
    role = unquote(urlsplit(reader).username or "").partition(" ")[0]
    async with transaction(postgresql_url) as connection:
        hide = f'REVOKE ALL ON ALL SEQUENCES IN SCHEMA public FROM "{role}"'
        await connection.execute(text(hide))
    async with Store.open(reader, read_only=True) as store:
        assert (await operations.verify(store)).is_sound
    found = {one.subject: one for one in await operations.examine(reader)}
    assert found["sequences"].text.startswith("not checked: only users with SELECT")
    other = f"{empty_sqlite_url}-other"
    with pytest.raises(rdb.DatabaseError, match=r"may not read the sequences.* db roles"):
        await operations.copy(reader, other)
    with pytest.raises(rdb.DatabaseUnavailableError, match="no such file"):  # nothing was written
        await Store.open(other, read_only=True)


def test_every_table_has_rights() -> None:
    """A new table needs an entry in `RIGHTS`."""
    from replaydb.database.postgresql.roles import RIGHTS

    views = {view.table.name for view in VIEWS}
    written = {name for rights in RIGHTS.values() for part in rights for name in part}
    assert metadata.tables.keys() - views - written == {"compatibility", "payload_place"}


def test_only_an_owner_applies_roles(
    login: Logins, postgres: PostgresServer, postgresql_url: str
) -> None:
    """The server ignores most of the statements of other users, with only a warning."""
    analyst = login("analyst")
    user = unquote(urlsplit(analyst).username or "")
    prefix = user.partition("_")[0]
    revoked = f'REVOKE INSERT ON payload FROM "{prefix}_writer"'
    granted = f"SELECT has_table_privilege('{prefix}_writer', 'payload', 'INSERT')::int"
    postgres.execute(postgresql_url, revoked)
    expected = "applied by the owner of the tables: .* is not a member of that role; nothing was"
    with pytest.raises(rdb.DatabaseError, match=expected):
        asyncio.run(operations.roles(analyst, prefix=prefix, apply=True))
    assert asyncio.run(operations.roles(analyst, prefix=prefix))  # anyone may print them
    assert postgres.fetch_int(postgresql_url, granted) == 0
    outcome = run("db", "roles", "--apply", url=analyst)
    assert (outcome.exit_code, outcome.stdout, outcome.stderr.count("\n")) == (1, "", 1)
    name = urlsplit(postgresql_url).username  # the owner
    postgres.execute(postgresql_url, f'GRANT "{name}" TO "{user}"')  # a member may
    asyncio.run(operations.roles(analyst, prefix=prefix, apply=True))
    assert postgres.fetch_int(postgresql_url, granted) == 1


def test_roles_can_use_the_schema(
    login: Logins, postgres: PostgresServer, own_postgresql_url: str
) -> None:
    """The owner of the tables need not be the owner of their schema."""
    user = f"t{uuid4().hex[:8]}"
    url = own_postgresql_url
    postgres.execute(url, f"CREATE ROLE {user} LOGIN CREATEROLE PASSWORD 'secret'")
    names = [*metadata.tables, "replaydb_alembic_version"]
    for name in names:
        postgres.execute(url, f"ALTER TABLE {name} OWNER TO {user}")
    postgres.execute(url, "REVOKE ALL ON SCHEMA public FROM PUBLIC")
    postgres.execute(url, f"GRANT USAGE ON SCHEMA public TO {user}")
    parts = urlsplit(url)
    own = urlunsplit(parts._replace(netloc=f"{user}:secret@{parts.netloc.rpartition('@')[2]}"))
    with pytest.raises(rdb.DatabaseError, match="may not grant USAGE on schema 'public'"):
        asyncio.run(operations.roles(own, prefix=user, apply=True))
    postgres.execute(url, f"GRANT USAGE ON SCHEMA public TO {user} WITH GRANT OPTION")
    assert asyncio.run(operations.roles(own, prefix=user, apply=True))
    postgres.execute(url, f"REVOKE ALL ON SCHEMA public FROM {user} CASCADE")
    for name in (f"{user}_writer", f"{user}_trainer", f"{user}_analyst", user):
        postgres.execute(url, f'DROP OWNED BY "{name}"')
        postgres.execute(url, f'DROP ROLE "{name}"')


def test_the_command_prints_or_applies(
    postgres: PostgresServer, postgresql_url: str, sqlite_url: str
) -> None:
    prefix = f'od"d {uuid4().hex[:8]}'
    printed = run("db", "roles", "--prefix", prefix, url=postgresql_url)
    assert printed.exit_code == 0, printed.output
    quoted = prefix.replace('"', '""')
    assert f'CREATE ROLE "{quoted}_writer" NOLOGIN;' in printed.output
    assert f'GRANT UPDATE (policy_version, policy_lineage) ON buffer TO "{quoted}_trainer";' in (
        printed.output
    )
    sql = f"SELECT count(*) FROM pg_roles WHERE rolname LIKE '{prefix}%'"  # noqa: S608
    assert postgres.fetch_int(postgresql_url, sql) == 0
    may = f"SELECT has_table_privilege('{prefix}_writer', 'buffer', 'DELETE')::int"
    for _ in range(2):  # the second run restores the rights
        applied = run("db", "roles", "--apply", "--prefix", prefix, url=postgresql_url)
        assert applied.output.startswith("ran "), applied.output
        assert postgres.fetch_int(postgresql_url, may) == 0
        postgres.execute(postgresql_url, f'GRANT DELETE ON buffer TO "{quoted}_writer"')
    assert postgres.fetch_int(postgresql_url, sql) == 3
    for ending in ("writer", "trainer", "analyst"):
        postgres.execute(postgresql_url, f'DROP OWNED BY "{quoted}_{ending}"')
        postgres.execute(postgresql_url, f'DROP ROLE "{quoted}_{ending}"')
    file = run("db", "roles", url=sqlite_url)
    assert (file.exit_code, "permissions" in file.stderr) == (1, True)
