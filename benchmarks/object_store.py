"""S3 service for benchmarks: yours, by URL, or SeaweedFS, which is installed with pip."""

from __future__ import annotations

import asyncio
import os
import socket
import sysconfig
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch
from uuid import uuid4

import obstore
import psutil

from replaydb.packs import PayloadStore

URL_VARIABLE = "REPLAYDB_PAYLOADS"
_SERVERS = ("admin", "master", "volume", "filer", "s3")
_CREDENTIALS = {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench-secret"}


@asynccontextmanager
async def object_store() -> AsyncIterator[str]:
    """Yield the URL of a new prefix. Credentials are set in the environment during the block."""
    if given := os.environ.get(URL_VARIABLE):
        head, _, query = given.partition("?")
        yield f"{head.rstrip('/')}/{uuid4().hex}?{query}".rstrip("?")
        return
    async with own_object_store() as (url, _):
        yield url


@asynccontextmanager
async def own_object_store() -> AsyncIterator[tuple[str, psutil.Process]]:
    """As `object_store`, but always a service on this machine. Also yield its process."""
    with tempfile.TemporaryDirectory(prefix="replaydb-s3-", ignore_cleanup_errors=True) as folder:
        before = {name: os.environ.get(name) for name in _CREDENTIALS}
        os.environ.update(_CREDENTIALS)
        ports = _free_ports(2 * len(_SERVERS))
        options = [
            f"-{server}.port{kind}={ports.pop()}" for server in _SERVERS for kind in ("", ".grpc")
        ]
        port = options[-2].partition("=")[2]
        process = await asyncio.create_subprocess_exec(
            *(str(Path(sysconfig.get_path("scripts"), "weed")), "mini", *options),
            *(f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-bucket=bench"),
            *("-admin.ui=false", "-webdav=false", "-s3.port.iceberg=0", "-s3.port.lance=0"),
            "-master.telemetry=false",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            url = f"s3://bench/{uuid4().hex}?endpoint=http://127.0.0.1:{port}&region=us-east-1"
            await _ready(url)
            yield url, psutil.Process(process.pid)
        finally:
            process.kill()
            await process.wait()
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


@contextmanager
def counted_requests(counts: Counter[str]) -> Iterator[None]:
    """Count requests of this process by kind. Up to 1000 objects are listed or deleted by one."""
    kinds = {
        "put_async": "PUT", "list": "LIST", "head_async": "HEAD", "get_async": "GET",
        "get_range_async": "GET", "delete_async": "DELETE",
    }  # fmt: skip

    def counted(name: str) -> Any:
        call = getattr(obstore, name)

        def asked(*args: Any, **kwargs: Any) -> Any:
            counts[kinds[name]] += 1
            return call(*args, **kwargs)

        return asked

    with ExitStack() as stack:
        for name in kinds:
            stack.enter_context(patch.object(obstore, name, counted(name)))
        yield


async def _ready(url: str) -> None:
    store, end = PayloadStore(url, uuid4().hex), asyncio.get_running_loop().time() + 60
    while True:
        try:
            await store.prepare(end)
        except Exception:
            if asyncio.get_running_loop().time() > end:
                raise
            await asyncio.sleep(0.05)
        else:
            return


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [int(probe.getsockname()[1]) for probe in probes]
