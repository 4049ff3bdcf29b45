"""PgBouncer in transaction mode in front of the tests' PostgreSQL, if it is installed."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit

from replaydb.database.urls import PostgresqlURL

MISSING = "PgBouncer is not installed. On Debian: make apt."
#: Server connections that all clients share.
POOL_SIZE = 5

# Settings that an operator needs; all others are defaults.
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
    """Return the path of PgBouncer, which is often not in the PATH of ordinary users."""
    return shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


def prepares() -> bool:
    """Whether PgBouncer prepares statements of clients on each connection: from 1.21 on."""
    binary = executable()
    assert binary is not None
    shown = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True).stdout
    major, minor = (int(part) for part in shown.split()[1].split(".")[:2])
    return (major, minor) >= (1, 21)


class Pooler:
    """A PgBouncer in front of a database.

    Attributes:
        url: URL of the database through it.
    """

    def __init__(self, url: str, folder: Path, settings: str) -> None:
        self._file, self._port = folder / "pgbouncer.ini", _free_port()
        given = _SETTINGS.format(target=_target(url), port=self._port, pool_size=POOL_SIZE)
        self._file.write_text(f"{given}{settings}\n")
        self._user = _owner(url) if os.geteuid() == 0 else None
        address = f"127.0.0.1:{self._port}{urlsplit(url).path}"
        self.url = f"postgresql://me@{address}?pgbouncer=true&sslmode=disable"
        self.start()

    def start(self) -> None:
        """Start it, and wait until it accepts connections."""
        binary = executable()
        assert binary is not None
        command = [binary, "--quiet", str(self._file)]
        self._process = subprocess.Popen(command, stderr=subprocess.DEVNULL, user=self._user)
        _wait_for(self._port, self._process)

    def send(self, number: signal.Signals) -> None:
        """Send a signal: SIGHUP reloads the settings, SIGUSR1 pauses and SIGUSR2 resumes."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """Kill it. All its connections are closed at once."""
        self._process.kill()
        self._process.wait()


@contextmanager
def pgbouncer(url: str, settings: str = "") -> Iterator[Pooler]:
    """Run a PgBouncer in the block, with additional settings, which replace others."""
    with tempfile.TemporaryDirectory(prefix="replaydb-pgbouncer-") as name:
        os.chmod(name, 0o755)  # noqa: S103 - if started by root, it runs as another user
        pooler = Pooler(url, Path(name), settings)
        try:
            yield pooler
        finally:
            pooler.kill()


def _owner(url: str) -> int:
    """Return a non-root user that may open the server's socket. PgBouncer does not run as root."""
    folders = [host for host, _ in PostgresqlURL.of(url).hosts if host.startswith("/")]
    return os.stat(folders[0]).st_uid if folders else 65534


def _target(url: str) -> str:
    """Return the server as a PgBouncer connection string."""
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
