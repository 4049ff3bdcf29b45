"""PgBouncer in transaction mode in front of the PostgreSQL of the tests, where it is installed."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit

from replaydb.database.engines.urls import PostgresqlURL

MISSING = "PgBouncer is not installed"
#: Connections of the server that all clients share.
POOL_SIZE = 5

# What an operator has to set; nothing else is asked for.
_SETTINGS = """
[databases]
* = {target}

[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = any
pool_mode = transaction
max_client_conn = 2000
default_pool_size = {pool_size}
"""


def executable() -> str | None:
    """Where it is; systems keep it out of the path of ordinary users."""
    return shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


@contextmanager
def pgbouncer(url: str, settings: str = "") -> Iterator[str]:
    """URL of the same database behind a PgBouncer, which ends with the block."""
    binary = executable()
    assert binary is not None
    with tempfile.TemporaryDirectory(prefix="replaydb-pgbouncer-") as name:
        os.chmod(name, 0o755)  # noqa: S103 - as root it runs as another user
        file, port = Path(name) / "pgbouncer.ini", _free_port()
        given = _SETTINGS.format(target=_target(url), port=port, pool_size=POOL_SIZE)
        file.write_text(f"{given}{settings}\n")
        process = subprocess.Popen(
            [binary, "--quiet", str(file)],
            stderr=subprocess.DEVNULL,
            user=_owner(url) if os.geteuid() == 0 else None,
        )
        try:
            _wait_for(port, process)
            database = urlsplit(url).path
            yield f"postgresql://me@127.0.0.1:{port}{database}?pgbouncer=true&sslmode=disable"
        finally:
            process.terminate()
            process.wait()


def _owner(url: str) -> int:
    """Somebody who may open the server's socket and is not root, as whom it does not run."""
    folders = [host for host, _ in PostgresqlURL.of(url).hosts if host.startswith("/")]
    return os.stat(folders[0]).st_uid if folders else 65534


def _target(url: str) -> str:
    """The server in PgBouncer's words."""
    parsed = PostgresqlURL.of(url)
    login = urlsplit(url).netloc.rpartition("@")[0]
    user, _, password = (unquote(part) for part in login.partition(":"))
    facts = {"user": user, "password": password}
    for host, port in parsed.hosts:
        facts |= {"host": host, "port": str(port or "")}
    return " ".join(f"{name}={value}" for name, value in facts.items() if value)


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 10
    while process.poll() is None and time.monotonic() < end:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.01)
    raise AssertionError("PgBouncer does not answer")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
