"""Database URLs: valid and invalid ones, and that no part of a password is ever shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import URL, func, select, text

import replaydb as rdb
from replaydb import Store
from replaydb.database.engines import backend_for
from replaydb.database.urls import PostgresqlURL
from replaydb.training.dataset import ReplayDataset
from support.connections import transaction
from support.errors import all_error_text
from support.groups import group

ME = "postgresql://me:secret@"


@pytest.mark.parametrize(
    ("url", "hosts"),
    [
        (f"{ME}db.example/replay", [("db.example", None)]),
        (f"{ME}one,two:5433,[::1]:5434/replay", [("one", None), ("two", 5433), ("::1", 5434)]),
        (f"{ME}/replay?host=one,two&port=5433", [("one", 5433), ("two", 5433)]),
        (f"{ME}one,two:1/replay?port=7,8", [("one", 7), ("two", 1)]),
        (f"{ME}/replay?host=/run/postgresql", [("/run/postgresql", None)]),
        (f"{ME}%2Frun%2Fpostgresql/replay", [("/run/postgresql", None)]),
        ("postgres:///replay", []),
        ("postgresql+asyncpg://one/replay", [("one", None)]),
        (URL.create("postgresql", "me", "secret", "one", 7, "replay"), [("one", 7)]),
    ],
)
def test_hosts(url: str | URL, hosts: list[tuple[str, int | None]]) -> None:
    assert list(PostgresqlURL.of(url).hosts) == hosts


def test_the_server_behind_pgbouncer() -> None:
    url = PostgresqlURL.of(f"{ME}pooler:6432/replay?pgbouncer=true&listen=one:5433,[::1]")
    direct = url.direct()
    assert (url.hosts, direct.hosts) == ((("pooler", 6432),), (("one", 5433), ("::1", None)))
    assert (url.through_pgbouncer, direct.through_pgbouncer) == (True, False)
    assert (url.prepares, direct.prepares) == (False, True)
    assert direct.dsn == url.dsn


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        (f"{ME}db/replay?sslmod=require", "the parameter 'sslmod'"),
        (f"{ME}db/replay?channel_binding=require", "channel_binding to be disable or prefer ("),
        (f"{ME}db/replay?require_auth=scram-sha-256", "require_auth to be absent (asyncpg"),
        (f"{ME}db/replay?service=training", "service to be absent (asyncpg"),
        (f"{ME}db/replay?sslnegotiation=none", "sslnegotiation to be one of postgres, direct"),
        (f"{ME}db/replay?sslmode=always", "sslmode to be one of disable, allow, prefer"),
        (f"{ME}db/replay?target_session_attrs=master", "target_session_attrs to be one of any"),
        (
            f"{ME}db/replay?sslrootcert=/no/root.pem",
            "sslrootcert to be an existing file, got '/no/root.pem'",
        ),
        (f"{ME}db/replay?connect_timeout=soon", "connect_timeout in seconds"),
        (f"{ME}db/replay?connect_timeout=-1", "connect_timeout in seconds"),
        (f"{ME}db/replay?sslmode=require&sslmode=disable", "'sslmode' twice"),
        (f"{ME}one/replay?listen=two", "'listen' only with 'pgbouncer', got one without it"),
        (f"{ME}one/replay?pgbouncer=true&listen=two:no", "a port from 1 to 65535"),
        (f"{ME}one/replay?host=two", "hosts only once"),
        (f"{ME}one,two/replay?port=1,2,3", "3 for 2 hosts"),
        (f"{ME}one,,two/replay", "a host before every colon and comma"),
        (f"{ME}:5432/replay", "a host before every colon and comma"),
        (f"{ME}db:99999/replay", "a port from 1 to 65535"),
        (f"{ME}db:0/replay", "a port from 1 to 65535"),
        ("sqlite:///replay.db?mode=ro", "without parameters, got a question mark"),
        ("sqlite:///replay.db?readonly", "without parameters, got a question mark"),
        ("sqlite://data/replay.db", "write three slashes instead of two"),
    ],
)
async def test_errors_name_the_invalid_part_in_one_line(url: str, expected: str) -> None:
    with pytest.raises(rdb.InvalidURLError) as caught:
        await Store.open(url)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "secret" not in all_error_text(caught.value)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("PGCHANNELBINDING", "require"),
        ("PGGSSENCMODE", "require"),
        ("PGHOSTADDR", "127.0.0.1"),
        ("PGREQUIREAUTH", "scram-sha-256"),
        ("PGREQUIREPEER", "postgres"),
        ("PGSERVICE", "training"),
        ("PGSSLCERTMODE", "require"),
        ("PGSSLCRLDIR", "/etc/ssl/crl"),
        ("PGSSLMODE", "always"),
        ("PGSSLROOTCERT", "/no/root.pem"),
    ],
)
async def test_variables_that_cannot_be_followed_are_refused(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(rdb.InvalidURLError) as caught:
        await Store.open(f"{ME}db/replay")
    assert caught.value.field == variable
    monkeypatch.setenv(variable, "")
    assert backend_for(f"{ME}db/replay").shown == "postgresql://me:***@db/replay"


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("PGPORT", "http", "ports from 1 to 65535, got 'http'"),
        ("PGPORT", "0", "ports from 1 to 65535, got '0'"),
        ("PGPORT", "9" * 5000, "ports from 1 to 65535, got '999"),
        ("PGPORT", "5432,5433,5434", "one port, or one per host, got 3 for 2 hosts"),
        ("PGCONNECT_TIMEOUT", "soon", "connect_timeout in seconds, 0 for no limit, got 'soon'"),
        ("PGCONNECT_TIMEOUT", "-1", "connect_timeout in seconds, 0 for no limit, got '-1'"),
        ("PGSSLMODE", "always", "one of disable, allow, prefer, "),
        ("PGSSLMINPROTOCOLVERSION", "SSLv3", "one of TLSv1, TLSv1.1, TLSv1.2, TLSv1.3, got 'SSL"),
        ("PGSSLMAXPROTOCOLVERSION", "2", "one of TLSv1, TLSv1.1, TLSv1.2, TLSv1.3, got '2'"),
        ("PGSSLNEGOTIATION", "tls", "one of postgres, direct, got 'tls'"),
        ("PGSSLNEGOTIATION", "direct", "direct only with an sslmode of require, verify-ca, verify"),
        ("PGTARGETSESSIONATTRS", "master", "one of any, read-write, "),
        ("PGGSSLIB", "heimdal", "one of gssapi, sspi, got 'heimdal'"),
        ("PGUSER", "\udcff", "text that is valid UTF-8, got other bytes"),
        ("PGPASSWORD", "\udcffpassword", "text that is valid UTF-8, got other bytes"),
    ],
)
async def test_invalid_variables_are_named(
    variable: str, value: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGPASSWORD", "secret password")
    monkeypatch.setenv(variable, value)
    with pytest.raises(rdb.InvalidURLError) as caught:
        await Store.open("postgresql://me@one,two/replay")
    assert caught.value.field == variable
    assert str(caught.value).startswith(f"{variable}: expected {expected}")
    assert "password" not in all_error_text(caught.value)


@pytest.mark.parametrize(
    ("value", "expected"),
    [("one:http", "ports from 1 to 65535, got 'http'"), ("one,,two", "a host before every colon")],
)
def test_hosts_of_the_environment(
    value: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGHOST", "one,two:7")
    monkeypatch.setenv("PGPORT", "5433,5434")
    assert PostgresqlURL.of("postgresql:///replay").hosts == (("one", 5433), ("two", 7))
    assert PostgresqlURL.of("postgresql://other:8/replay").hosts == (("other", 8),)
    monkeypatch.setenv("PGHOST", value)
    with pytest.raises(rdb.InvalidURLError, match=f"PGHOST: expected {expected}"):
        PostgresqlURL.of("postgresql:///replay")
    monkeypatch.delenv("PGHOST")
    monkeypatch.setenv("PGPORT", "5433")
    assert PostgresqlURL.of("postgresql:///replay").hosts == ()
    monkeypatch.setenv("PGPORT", "http")
    assert PostgresqlURL.of("postgresql://other:8/replay").hosts == (("other", 8),)
    with pytest.raises(rdb.InvalidURLError, match="PGPORT: expected ports"):
        PostgresqlURL.of("postgresql:///replay")


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("PGTZ", "Mars/Olympus"),
        ("PGDATESTYLE", "backwards"),
        ("PGGEQO", "perhaps"),
        ("PGOPTIONS", "-c work_mem=lots"),
        ("PGOPTIONS", "-c no_such_parameter=1"),
    ],
)
async def test_variables_that_the_server_refuses_are_named(
    empty_postgresql_url: str, variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(rdb.InvalidURLError, match="parameters that the server accepts") as caught:
        await Store.open(empty_postgresql_url)
    assert caught.value.field == variable


def test_parameters_of_a_url_precede_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in {
        "PGCHANNELBINDING": "require",
        "PGCONNECT_TIMEOUT": "7",
        "PGGSSENCMODE": "prefer",
        "PGOPTIONS": "-c work_mem=5MB",
        "PGSSLMODE": "require",
        "PGSSLNEGOTIATION": "direct",
        "PGTARGETSESSIONATTRS": "prefer-standby",
        "PGTZ": "Europe/Berlin",
    }.items():
        monkeypatch.setenv(variable, value)
    url = PostgresqlURL.of(f"{ME}db/replay?channel_binding=disable")
    assert url.connect_seconds == 7
    assert url.settings == {"options": "-c work_mem=5MB", "timezone": "Europe/Berlin"}
    assert url.kinds == ("standby", "any")
    assert url.direct_tls
    assert url.dsn == f"{ME}/replay?sslmode=require"
    assert url.shown == "postgresql://me:***@db/replay?channel_binding=disable"
    given = "channel_binding=prefer&connect_timeout=3&options=-c%20x.y=1&sslmode=disable"
    url = PostgresqlURL.of(f"{ME}db/replay?{given}&sslnegotiation=postgres")
    assert (url.connect_seconds, url.settings["options"]) == (3, "-c x.y=1")
    assert (url.dsn, url.direct_tls) == (f"{ME}/replay?sslmode=disable", False)


async def test_the_database_of_the_environment(
    empty_postgresql_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, _, name = empty_postgresql_url.partition("?")[0].rpartition("/")
    query = empty_postgresql_url.partition("?")[2]
    monkeypatch.setenv("PGDATABASE", name)
    for path in ("", "/"):
        async with transaction(f"{base}{path}?{query}") as connection:
            assert await connection.scalar(select(func.current_database())) == name


async def test_options_of_the_environment_apply_to_every_connection(
    empty_postgresql_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with transaction(empty_postgresql_url) as connection:
        await connection.execute(text("CREATE SCHEMA training"))
    monkeypatch.setenv("PGOPTIONS", "-c search_path=training")
    async with Store.open(empty_postgresql_url, migrate=True) as store:
        await (await store.buffer("math")).put(group())
    monkeypatch.setenv("PGOPTIONS", "-c search_path=training -c default_transaction_read_only=on")
    async with Store.open(empty_postgresql_url) as store:
        buffer = await store.buffer("math")
        with pytest.raises(rdb.DatabaseReadOnlyError):
            await buffer.put(group())
        assert await buffer.count() == 1
    monkeypatch.delenv("PGOPTIONS")
    async with transaction(empty_postgresql_url) as connection:
        found = await connection.scalar(text("SELECT count(*) FROM training.episode_group"))
    assert found == 1


PARTS = ("alpha", "bravo", "carol")


@pytest.mark.parametrize(
    "url",
    [
        *(
            f"postgresql://me:alpha{one}bravo{other}carol@127.0.0.1:1/replay?sslmode=disable"
            for one in "@:/?#[]%"
            for other in "@:/?#[]="
        ),
        "postgresql://me:alpha/bravo",
        "postgresql://me:alpha?bravo=carol",
        "postgresql://me:alpha@127.0.0.1:bravo/carol",
        "postgresql://127.0.0.1:1/replay?user=me&password=alpha/bravo:carol",
        "postgresql://127.0.0.1:1/replay?user=me&password=alpha@bravo",
        "postgresql://127.0.0.1:1/replay?user=me&password=alpha&bravo=carol",
        "postgresql://127.0.0.1:1/replay?sslpassword=alpha&password=bravo&user=carol-alpha",
        "mysql://me:alpha@bravo/carol",
        "sqlite://me:alpha@bravo/carol",
        "//me:alpha@bravo/carol",
    ],
)
async def test_no_part_of_a_password_is_shown(url: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    url = url.replace("user=carol-alpha", "user=someone")
    with pytest.raises(rdb.ReplayDBError) as caught:
        await Store.open(url, run="a")
    shown = all_error_text(caught.value) + caplog.text
    assert not [part for part in PARTS if part in shown]
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["me:alpha@host", "pa@ss@host", "pa/ss@host", "pa?ss@host"])
def test_errors_ask_for_percent_encoding(text: str) -> None:
    url = f"postgresql://me:{text}/replay"
    if text.startswith("pa"):
        with pytest.raises(rdb.InvalidURLError, match="percent-encoded"):
            backend_for(url)
    else:
        assert backend_for(url).shown == "postgresql://me:***@host/replay"


def test_shown_urls_have_no_passwords(tmp_path: Path) -> None:
    key = tmp_path / "client.key"
    key.touch()
    url = f"postgresql://one:7,two/replay?user=me&password=alpha&sslkey={key}&sslpassword=bravo"
    backend: Any = backend_for(url)
    assert backend.shown == f"postgresql://:***@one:7,two/replay?user=me&sslkey={key}"
    dataset = ReplayDataset(url=url, buffer="math", batch_size=2)
    opened = backend.connections.opening()
    [engine] = opened.args
    for shown in (repr(dataset), repr(backend.url), repr(opened), repr(engine.pool.__dict__)):
        assert "alpha" not in shown
        assert "bravo" not in shown
