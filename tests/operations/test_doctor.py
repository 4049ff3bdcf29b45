"""`doctor` finds problems on real engines, suggests fixes and changes nothing."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from sqlalchemy import update

import replaydb as rdb
from replaydb import Store
from replaydb.database import migrations
from replaydb.database.postgresql import checkup as postgresql_checkup
from replaydb.database.runtime.revisions import version_table
from replaydb.database.sqlite import checkup as sqlite_checkup
from replaydb.database.sqlite import location
from replaydb.operations import Finding, examine
from support import pgbouncer
from support.clock import Clock
from support.command import json_of, rows_of, run
from support.connections import transaction
from support.groups import groups, long_group
from support.postgres import PostgresServer
from support.users import without_root

#: A read-only store sends this parameter unless its URL has pgbouncer=true.
IGNORED = "ignore_startup_parameters = max_parallel_workers_per_gather"
#: Warnings of every test server, which is configured for speed.
FAST = {"durability", "autovacuum"}


def wrong(found: tuple[Finding, ...]) -> dict[str, Finding]:
    assert all((one.fix is None) == (one.level == "good") for one in found), found
    return {one.subject: one for one in found if one.level != "good"}


def path_of(url: str) -> Path:
    return Path(url.removeprefix("sqlite:///"))


@pytest.fixture(autouse=True)
def fixed_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat the installed SQLite as free of known faults."""
    monkeypatch.setattr(sqlite_checkup, "_FIXED", (3, 0, 0))


async def test_good_results_are_included(store: Store, engine_name: str, url: str) -> None:
    await (await store.buffer("math")).put(groups(3))
    found = await examine(url)
    assert wrong(found).keys() == (FAST if engine_name == "postgresql" else set())
    subjects = {one.subject for one in found}
    assert {"tables", "clock", "sequences", "payload store"} <= subjects
    engine = {"SQLite", "journal", "log", "disk", "rights"}
    server = {"PostgreSQL", "pooler", "server", "commits", "encoding", "limits", "indexes",
              "payloads", "server log"}  # fmt: skip
    assert (engine if engine_name == "sqlite" else server | FAST) <= subjects


async def test_tables_of_another_version(empty_url: str, engine_name: str) -> None:
    await migrations.upgrade(empty_url, "0005")
    found = wrong(await examine(empty_url))
    assert found.keys() - FAST == {"tables"}  # other checks are skipped
    old = found["tables"]
    assert (old.level, "replaydb db upgrade" in old.text) == ("bad", True)
    await migrations.upgrade(empty_url)
    assert "tables" not in wrong(await examine(empty_url))


async def test_a_missing_index(own_url: str) -> None:
    await _execute(own_url, "DROP INDEX ix_draw_step")
    gone = wrong(await examine(own_url))["tables"]
    assert (gone.level, "ix_draw_step" in gone.text) == ("bad", True)
    assert gone.fix == "replaydb db upgrade"
    await _execute(own_url, "CREATE INDEX ix_draw_step ON draw (buffer_id, step)")
    assert "tables" not in wrong(await examine(own_url))


async def test_a_missing_database(url: str, engine_name: str, tmp_path: Path) -> None:
    if engine_name == "sqlite":
        missing = f"sqlite:///{tmp_path / 'missing.db'}"
    else:
        missing = url.rsplit("?", 1)[0].rsplit("/", 1)[0] + "/missing"
        missing += url[url.index("?") :] if "?" in url else ""
    (found,) = await examine(missing)
    assert (found.level, found.subject) == ("bad", "connection")
    assert not (tmp_path / "missing.db").exists()


async def test_clock_skew(url: str, clock: Clock) -> None:
    clock.jump(1.5)
    assert "clock" not in wrong(await examine(url))
    clock.jump(10)
    skew = wrong(await examine(url))["clock"]
    assert (skew.level, "ahead" in skew.text) == ("warning", True)
    clock.jump(-20)
    assert "behind" in wrong(await examine(url))["clock"].text


@pytest.mark.parametrize("layout", ["outside"])
async def test_a_missing_payload_store(layout: str, url: str) -> None:
    good = {one.subject: one for one in await examine(url)}["payload store"]
    assert good.level == "good"
    folder = Path(good.text.removeprefix("file://"))
    folder.rename(folder.with_name("away"))  # noqa: ASYNC240
    gone = wrong(await examine(url))["payload store"]
    assert (gone.level, "relocate" in (gone.fix or "")) == ("bad", True)


async def test_a_library_with_a_known_fault(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_checkup, "_FIXED", (99, 0, 0))
    fault = wrong(await examine(sqlite_url))["SQLite"]
    assert (fault.level, sqlite3.sqlite_version in fault.text) == ("warning", True)
    line = tuple(int(part) for part in sqlite3.sqlite_version.split("."))[:2]
    monkeypatch.setattr(sqlite_checkup, "_FIXED_EARLIER", {line: 0})
    assert "SQLite" not in wrong(await examine(sqlite_url))


async def test_a_network_filesystem(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(location, "_mount_of", lambda path: (path.parent, "nfs4"))
    (found,) = await examine(sqlite_url)
    assert (found.level, found.subject, "nfs4" in found.text) == ("bad", "location", True)


async def test_a_file_with_another_journal(sqlite_url: str) -> None:
    _in_file(sqlite_url, "PRAGMA journal_mode = DELETE")
    assert wrong(await examine(sqlite_url)).keys() == {"journal"}
    with closing(sqlite3.connect(path_of(sqlite_url))) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)  # unchanged


async def test_a_log_that_grows_during_a_long_read(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_checkup, "LONG_LOG", 6_000_000)
    async with Store.open(sqlite_url) as store:
        buffer = await store.buffer("math")
        reader = sqlite3.connect(path_of(sqlite_url), isolation_level=None)
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM buffer").fetchall()
        for i in range(20):
            await buffer.put([long_group(f"{i}-{j}", 30_000) for j in range(2)])
        assert wrong(await examine(sqlite_url))["log"].level == "warning"
        reader.close()


async def test_tables_with_later_additions(own_url: str) -> None:
    async with transaction(own_url) as connection:
        await connection.execute(update(version_table).values(version_num="9999"))
    found = wrong(await examine(own_url))
    assert found.keys() - FAST == {"tables"}
    assert found["tables"].level == "warning"
    assert "9999 of a newer replaydb" in found["tables"].text


async def test_a_full_disk(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_checkup, "LEAST_FREE", 1 << 62)
    found = wrong(await examine(sqlite_url))["disk"]
    assert found.level == "bad"
    shown = float(found.text.partition(" MB are free")[0].replace(",", ""))
    assert shown == pytest.approx(shutil.disk_usage("/").free / 1e6, rel=0.5)


def test_a_read_only_file(sqlite_url: str) -> None:
    # The folders of pytest are private to the user that runs it.
    with tempfile.TemporaryDirectory(prefix="replaydb-closed-") as name:
        folder = Path(name)
        shutil.copy(path_of(sqlite_url), folder / "replay.db")
        (folder / "replay.db").chmod(0o444)
        folder.chmod(0o555)
        with without_root():
            found = wrong(asyncio.run(examine(f"sqlite:///{folder}/replay.db")))
        folder.chmod(0o755)
    assert found["rights"].level == "warning"


async def test_an_unsafe_server_configuration(postgresql_url: str) -> None:
    """The test server has one."""
    found = await examine(postgresql_url)
    bad = {one.text.split()[0] for one in found if one.level == "bad"}
    assert bad == {"fsync", "full_page_writes", "synchronous_commit", "autovacuum"}


async def test_limits_that_are_too_short(own_postgresql_url: str) -> None:
    names = ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout",
             "idle_session_timeout", "transaction_timeout")  # fmt: skip
    found = {one.subject: one for one in await examine(own_postgresql_url)}["limits"]
    assert found.level == "good"
    database = urlsplit(own_postgresql_url).path.removeprefix("/")
    for name in names:
        await _execute(own_postgresql_url, f'ALTER DATABASE "{database}" SET {name} = 59000')
    short = [one for one in await examine(own_postgresql_url) if one.subject == "limits"]
    assert {one.text.split()[0] for one in short} == set(names)
    assert all(one.level == "warning" and "59 s" in one.text for one in short)
    assert all("ALTER ROLE" in (one.fix or "") for one in short)


async def test_sessions_whose_activity_is_not_tracked(own_postgresql_url: str) -> None:
    found = {one.subject: one for one in await examine(own_postgresql_url)}["commits"]
    assert found.level == "good"
    database = urlsplit(own_postgresql_url).path.removeprefix("/")
    await _execute(own_postgresql_url, f'ALTER DATABASE "{database}" SET track_activities = off')
    found = wrong(await examine(own_postgresql_url))["commits"]
    assert (found.level, "track_activities" in found.text) == ("warning", True)
    assert "track_activities = on" in (found.fix or "")


async def test_a_database_without_write_transactions(own_postgresql_url: str) -> None:
    url = own_postgresql_url
    await _set_in_database(url, "default_transaction_read_only = on")
    found = wrong(await examine(url))["server"]
    assert (found.level, "default_transaction_read_only" in found.text) == ("warning", True)
    async with Store.open(url) as store:
        with pytest.raises(rdb.DatabaseReadOnlyError):
            await store.buffer("math")


async def test_a_server_log_with_payloads(own_postgresql_url: str) -> None:
    url = own_postgresql_url
    for setting in ("log_statement = 'all'", "log_min_duration_statement = 100"):
        await _set_in_database(url, "log_statement = 'none'")
        await _set_in_database(url, setting)
        logged = wrong(await examine(url))["server log"]
        assert (logged.level, setting.split()[0] in logged.text) == ("warning", True)
    await _set_in_database(url, "log_parameter_max_length = 1024")
    assert "server log" not in wrong(await examine(url))


POOLERS = {  # level for a URL with pgbouncer=true, and for one without
    "transaction": ("good", "bad"),
    "session": ("warning", "good"),
}


@pytest.mark.parametrize("mode", POOLERS)
@pytest.mark.parametrize("order", ["server_round_robin = 0", "server_round_robin = 1"])
async def test_a_pooler_and_the_parameter_of_the_url(
    postgresql_url: str, mode: str, order: str
) -> None:
    if pgbouncer.executable() is None:
        pytest.skip(pgbouncer.MISSING)
    settings = f"pool_mode = {mode}\n{order}\n{IGNORED}"
    with pgbouncer.pgbouncer(postgresql_url, settings) as pooler:
        plain = pooler.url.replace("pgbouncer=true", "pgbouncer=false")
        levels = tuple([(await _about(url, "pooler"))[0].level for url in (pooler.url, plain)])
        assert levels == POOLERS[mode]
        subjects = {one.subject for one in await examine(plain)}
    assert subjects == {"pooler"} if mode == "transaction" else "tables" in subjects


@pytest.mark.parametrize("given", ["true", "prepared"])
async def test_a_url_that_names_a_pooler_which_is_not_there(
    postgresql_url: str, given: str
) -> None:
    (found,) = await _about(f"{postgresql_url}&pgbouncer={given}", "pooler")
    assert (found.level, "to the server itself" in found.text) == ("warning", True)
    assert found.text.startswith(f"pgbouncer={given}, but")
    assert f"pgbouncer={given}" in (found.fix or "")


async def test_an_index_that_was_never_finished(own_postgresql_url: str) -> None:
    invalid = "UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'ix_draw_latest'::regclass"
    await _execute(own_postgresql_url, invalid)
    found = wrong(await examine(own_postgresql_url))["indexes"]
    assert (found.level, "ix_draw_latest" in found.text) == ("bad", True)


async def test_an_old_server_with_compressed_payloads(
    own_postgresql_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await _execute(own_postgresql_url, "ALTER TABLE payload ALTER COLUMN data SET STORAGE EXTENDED")
    monkeypatch.setattr(postgresql_checkup, "BOUNDS_TRANSACTIONS", 99)
    assert wrong(await examine(own_postgresql_url)).keys() == {"payloads", "PostgreSQL"} | FAST


def test_a_database_with_another_encoding(postgres: PostgresServer) -> None:
    url = postgres.create_database("latin")
    name = url.split("?")[0].rsplit("/", 1)[1]
    postgres.execute(postgres.url, f'DROP DATABASE "{name}"')
    how = "ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0"
    postgres.execute(postgres.url, f'CREATE DATABASE "{name}" {how}')
    found = wrong(asyncio.run(examine(url)))
    assert (found["encoding"].level, found["tables"].level) == ("bad", "bad")
    postgres.drop_database(url)


def test_the_doctor_command(url: str, engine_name: str, tmp_path: Path) -> None:
    result = run("doctor", url=url)
    assert result.exit_code == (1 if engine_name == "postgresql" else 0), result.output
    assert "revision" in result.output
    assert any(line.split() == ["check", "result", "fix"] for line in result.output.splitlines())
    bad = run("doctor", "--json", url=f"sqlite:///{tmp_path / 'missing.db'}")
    assert bad.exit_code == 1
    assert '"level": "bad"' in bad.stdout
    if engine_name == "sqlite":
        assert ["good", "clock"] in [row[:2] for row in rows_of(result)]
        assert {one["level"] for one in json_of("doctor", url=url)} == {"good"}


def _in_file(url: str, *statements: str) -> None:
    connection = sqlite3.connect(path_of(url), isolation_level=None)
    for statement in statements:
        connection.execute(statement)
    connection.close()


async def _execute(url: str, statement: str) -> None:
    async with transaction(url) as connection:
        await connection.exec_driver_sql(statement)


async def _set_in_database(url: str, setting: str) -> None:
    await _execute(url, f'ALTER DATABASE "{urlsplit(url).path.removeprefix("/")}" SET {setting}')


async def _about(url: str, subject: str) -> list[Finding]:
    return [one for one in await examine(url) if one.subject == subject]
