"""PostgreSQL with password authentication, and a TLS proxy for it on 127.0.0.1.

The PostgreSQL that pip installs is built without TLS, so the proxy terminates it. For the client,
which is tested here, the proxy behaves like a server.
"""

from __future__ import annotations

import asyncio
import ssl
import struct
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import asyncpg
import trustme

from support.postgres import data_folder

#: Contains every character with a meaning in URLs.
PASSWORD = "gehe1m@:/?#[]% &=ß"  # noqa: S105
USER = "me"
_HBA = f"""
local all {USER} scram-sha-256
local all all trust
"""
_SSL_REQUEST = struct.pack("!ii", 8, 80877103)


@dataclass(frozen=True)
class PasswordServer:
    """A server on a Unix socket. The superuser needs no password, `USER` needs `PASSWORD`."""

    socket_folder: Path

    @property
    def local_url(self) -> str:
        """URL for the superuser."""
        return f"postgresql://postgres@{quote(str(self.socket_folder), safe='')}/replay"


@contextmanager
def password_server() -> Iterator[PasswordServer]:
    """Run a server with a database `replay` in the block."""
    with data_folder("fsync = off\n") as server:
        server.start()
        try:
            folder = Path(server.get_postmaster_info().socket_dir)
            asyncio.run(_add_user(folder))
            (server.pgdata / "pg_hba.conf").write_text(_HBA)
            asyncio.run(_reload(folder))
            yield PasswordServer(folder)
        finally:
            server.cleanup()


async def _add_user(folder: Path) -> None:
    connection = await asyncpg.connect(host=str(folder), user="postgres", database="postgres")
    await connection.execute(f"CREATE ROLE {USER} SUPERUSER LOGIN PASSWORD '{PASSWORD}'")
    await connection.execute("CREATE DATABASE replay")
    await connection.close()


async def _reload(folder: Path) -> None:
    connection = await asyncpg.connect(host=str(folder), user="postgres", database="postgres")
    await connection.execute("SELECT pg_reload_conf()")
    await connection.close()


@dataclass(frozen=True)
class Certificates:
    """PEM files: the root certificate of the proxy, another root, and a client certificate."""

    root: Path
    other_root: Path
    client_cert: Path
    client_key: Path
    server: ssl.SSLContext

    @classmethod
    def made_in(cls, folder: Path) -> Certificates:
        """Create new ones. The proxy's certificate is for the address 127.0.0.1, without a name."""
        authority, other = trustme.CA(), trustme.CA()
        client = authority.issue_cert("client.invalid", common_name="worker-7")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert("127.0.0.1").configure_cert(context)
        authority.configure_trust(context)
        context.verify_mode = ssl.CERT_OPTIONAL
        found = cls(folder / "root", folder / "other", folder / "cert", folder / "key", context)
        authority.cert_pem.write_to_path(found.root)
        other.cert_pem.write_to_path(found.other_root)
        client.cert_chain_pems[0].write_to_path(found.client_cert)
        client.private_key_pem.write_to_path(found.client_key)
        found.client_key.chmod(0o600)
        return found


class Door:
    """Proxy to a server's socket, with TLS if the client requests it.

    Attributes:
        port: Port on 127.0.0.1.
        certificates: Certificates of the proxy and of clients.
        encrypted: Whether the last connection used TLS.
        client: Common name in the client certificate of the last connection.
    """

    def __init__(self, target: Path, certificates: Certificates) -> None:
        self.port = 0
        self.certificates = certificates
        self.encrypted: bool | None = None
        self.client: str | None = None
        self._target = target / ".s.PGSQL.5432"

    def url(self, query: str = "", *, hosts: str | None = None, password: str = PASSWORD) -> str:
        """Return the URL of the database `replay` through the proxy, for `USER`."""
        address = f"127.0.0.1:{self.port}" if hosts is None else hosts
        return f"postgresql://{USER}:{quote(password, safe='')}@{address}/replay{query}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection until either side closes it."""
        with suppress(OSError, asyncio.IncompleteReadError), closing(writer.transport):
            start = await reader.readexactly(8)
            self.encrypted = start == _SSL_REQUEST
            if self.encrypted:
                writer.write(b"S")
                await writer.start_tls(self.certificates.server)
                self.client = _common_name(writer.get_extra_info("peercert"))
                start = b""
            inside, outside = await asyncio.open_unix_connection(str(self._target))
            with closing(outside.transport):
                outside.write(start)
                await _first_of(_copy(reader, outside), _copy(inside, writer))


async def _first_of(*works: Coroutine[Any, Any, None]) -> None:
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    while some := await source.read(1 << 16):
        target.write(some)
        await target.drain()


def _common_name(certificate: dict[str, object] | None) -> str | None:
    if not certificate:
        return None
    subject: object = certificate["subject"]
    assert isinstance(subject, tuple)
    return {key: value for ((key, value),) in subject}.get("commonName")


@asynccontextmanager
async def open_door(server: PasswordServer, certificates: Certificates) -> AsyncIterator[Door]:
    """Run a TLS proxy in this event loop."""
    door = Door(server.socket_folder, certificates)
    serving: set[asyncio.Task[None]] = set()

    def enter(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.add(asyncio.create_task(door.serve(reader, writer)))

    listening = await asyncio.start_server(enter, "127.0.0.1", 0)
    door.port = listening.sockets[0].getsockname()[1]
    try:
        yield door
    finally:
        listening.close()
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)
        await asyncio.sleep(0)  # let closed transports finish
