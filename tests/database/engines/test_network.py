"""Parameters of libpq, with a server that requires passwords and supports TLS."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import pytest
from sqlalchemy import text

import replaydb as rdb
from replaydb import Store
from support.errors import all_error_text
from support.groups import group
from support.network_postgres import PASSWORD, Door, PasswordServer


async def answer_of(url: str, sql: str) -> object:
    """Return the result of a query on a connection of a store."""
    async with Store.open(url) as store:
        return await store._database.read(lambda session: session.core.scalar(text(sql)))


@pytest.mark.parametrize("mode", ["disable", "allow", "prefer", "require", None])
async def test_encryption_follows_sslmode(network: Door, mode: str | None) -> None:
    assert await answer_of(network.url("" if mode is None else f"?sslmode={mode}"), "SELECT 1") == 1
    assert network.encrypted is (mode not in ("disable", "allow"))


@pytest.mark.parametrize("mode", ["verify-ca", "verify-full"])
async def test_the_right_root_is_trusted(network: Door, mode: str) -> None:
    root = network.certificates.root
    assert await answer_of(network.url(f"?sslmode={mode}&sslrootcert={root}"), "SELECT 1") == 1
    assert network.encrypted


@pytest.mark.parametrize(
    ("host", "mode", "right"),
    [
        ("127.0.0.1", "verify-ca", False),
        ("127.0.0.1", "verify-full", False),
        ("localhost", "verify-full", True),  # the certificate names the address only
    ],
)
async def test_another_server_is_not_trusted(
    network: Door, host: str, mode: str, right: bool
) -> None:
    root = network.certificates.root if right else network.certificates.other_root
    query = f"?sslmode={mode}&sslrootcert={root}"
    with pytest.raises(rdb.DatabaseUnavailableError, match="CERTIFICATE_VERIFY_FAILED") as caught:
        await Store.open(network.url(query, hosts=f"{host}:{network.port}"))
    assert "\n" not in str(caught.value)


async def test_a_missing_root_certificate(
    network: Door, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(rdb.InvalidURLError, match="root certificate file"):
        await Store.open(network.url("?sslmode=verify-full"))


async def test_a_certificate_of_the_client(network: Door) -> None:
    files = network.certificates
    given = f"sslcert={files.client_cert}&sslkey={files.client_key}"
    assert await answer_of(network.url(f"?sslmode=require&{given}"), "SELECT 1") == 1
    assert network.client == "worker-7"


async def test_parameters_of_the_session(network: Door) -> None:
    options = quote("-c statement_timeout=54321 -c work_mem=5MB")
    url = network.url(f"?application_name=rollout-7&options={options}&connect_timeout=20")
    assert await answer_of(url, "SHOW application_name") == "rollout-7"
    assert await answer_of(url, "SHOW work_mem") == "5MB"
    assert await answer_of(network.url(), "SHOW application_name") == f"replaydb {rdb.__version__}"


@pytest.mark.parametrize("scheme", ["postgres", "postgresql+asyncpg"])
async def test_other_names_of_the_scheme(network: Door, scheme: str) -> None:
    url = network.url().replace("postgresql", scheme, 1)
    async with Store.open(url, run="a") as store:
        buffer = await store.buffer("math")
        await buffer.put(group())
        assert len(await buffer.sample(1)) == 1


async def test_the_folder_of_a_socket(server: PasswordServer) -> None:
    query = f"host={server.socket_folder}&port=5432&user=postgres"
    assert await answer_of(f"postgresql:///replay?{query}", "SELECT current_user") == "postgres"


@contextmanager
def dead_and_silent_hosts() -> Iterator[tuple[str, str]]:
    """Yield an address without a server, and one that accepts connections and never answers."""
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        socket.socket() as dead,
    ):
        dead.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{dead.getsockname()[1]}", f"127.0.0.1:{silent.getsockname()[1]}"


async def test_hosts_are_tried_in_order(network: Door) -> None:
    with dead_and_silent_hosts() as (dead, silent):
        hosts = f"{dead},{silent},127.0.0.1:{network.port}"
        url = network.url("?connect_timeout=1", hosts=hosts)
        assert await answer_of(url, "SELECT 1") == 1


@pytest.mark.parametrize(
    ("kind", "found"),
    [("read-write", True), ("primary", True), ("prefer-standby", True), ("standby", False)],
)
async def test_target_session_attrs(network: Door, kind: str, found: bool) -> None:
    url = network.url(f"?target_session_attrs={kind}")
    if found:
        assert await answer_of(url, "SELECT 1") == 1
    else:
        with pytest.raises(rdb.DatabaseUnavailableError, match="standby"):
            await Store.open(url)


async def test_a_wrong_password_is_not_shown(
    network: Door, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with pytest.raises(rdb.DatabaseUnavailableError, match="28P01") as caught:
        await Store.open(network.url(password=f"{PASSWORD}x"))
    shown = all_error_text(caught.value) + caplog.text
    assert PASSWORD not in shown
    assert quote(PASSWORD, safe="") not in shown


async def test_a_password_file(
    network: Door, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    passfile = tmp_path / "pgpass"
    passfile.write_text(f"127.0.0.1:{network.port}:replay:me:{PASSWORD}\n", encoding="utf8")
    passfile.chmod(0o600)
    url = f"postgresql://me@127.0.0.1:{network.port}/replay"
    monkeypatch.setenv("PGPASSFILE", str(passfile))
    assert await answer_of(url, "SELECT current_user") == "me"
