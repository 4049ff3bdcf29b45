"""The settings of docker-compose.yml, on the servers of the tests."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest
import yaml

from replaydb import Store
from replaydb.database import migrations
from replaydb.operations import examine
from support import pgbouncer
from support.groups import groups
from support.postgres import data_folder

ROOT = Path(__file__).parents[2]
SERVICES: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
#: Variables of the image that are not settings of PgBouncer, and the port.
NOT_SETTINGS = {"DB_HOST", "DB_USER", "DB_PASSWORD", "LISTEN_PORT"}
PASSWORD = "secret"  # noqa: S105


def server_settings() -> dict[str, str]:
    program, *options = SERVICES["postgres"]["command"]
    assert program == "postgres"
    pairs = [option.removeprefix("--").partition("=") for option in options]
    return {name: value for name, _, value in pairs}


@pytest.fixture(scope="module")
def server_url() -> Iterator[str]:
    """A migrated database on a server with the settings of the compose file alone."""
    settings = "\n".join(f"{name} = {value}" for name, value in server_settings().items())
    with data_folder(f"{settings}\n") as server:
        server.start()
        try:
            url = server.get_uri()
            asyncio.run(migrations.upgrade(url))
            yield url
        finally:
            server.cleanup()


async def test_postgresql_has_its_settings(server_url: str) -> None:
    connection = await asyncpg.connect(server_url)
    shown = {name: await connection.fetchval(f"SHOW {name}") for name in server_settings()}
    await connection.close()
    assert shown == server_settings()


async def test_the_doctor_finds_nothing(server_url: str) -> None:
    assert {one.level for one in await examine(server_url)} == {"good"}


async def test_pgbouncer_runs_with_its_settings(server_url: str) -> None:
    """Clients have the password of the compose file's user."""
    if pgbouncer.executable() is None:
        pytest.skip(pgbouncer.MISSING)
    service = SERVICES["pgbouncer"]
    given = {name: it for name, it in service["environment"].items() if name not in NOT_SETTINGS}
    assert given["POOL_MODE"] == "transaction"
    with tempfile.TemporaryDirectory(prefix="replaydb-users-") as name:
        os.chmod(name, 0o755)  # noqa: S103 - PgBouncer runs as another user
        users = Path(name) / "userlist.txt"
        users.write_text(f'"replaydb" "{PASSWORD}"\n')
        lines = [f"{setting.lower()} = {value}" for setting, value in given.items()]
        lines.append(f"auth_file = {users}")
        with pgbouncer.pgbouncer(server_url, "\n".join(lines)) as pooler:
            url = pooler.url.replace("//me@", f"//replaydb:{PASSWORD}@")
            async with Store.open(url) as store:
                buffer = await store.buffer("math")
                await buffer.put(groups(4))
                assert len(await buffer.sample(4)) == 4
            assert {one.level for one in await examine(url)} == {"good"}
