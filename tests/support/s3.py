"""S3 service for tests: SeaweedFS, installed by pip."""

from __future__ import annotations

import json
import socket
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import obstore
from obstore.store import S3Store

#: Credentials of a user that may read and write, but not create buckets.
KEY = "the-key-of-tests"
SECRET = "the-secret-of-tests"  # noqa: S105
BUCKET = "payloads"

_ADMIN = {"accessKey": "admin", "secretKey": "the-secret-of-admin"}
_IDENTITIES: dict[str, Any] = {
    "identities": [
        {"name": "admin", "credentials": [_ADMIN], "actions": ["Admin", "Read", "Write", "List"]},
        {
            "name": "tests",
            "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
            "actions": ["Read", "Write", "List"],
        },
    ]
}
_WEED = str(Path(sysconfig.get_path("scripts"), "weed"))
_SERVERS = ("admin", "master", "volume", "filer", "s3")


class S3Server:
    """A server with one bucket. It can be killed and restarted."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ports = _free_ports(2 * len(_SERVERS))
        self._process: subprocess.Popen[bytes] | None = None
        (folder / "s3.json").write_text(json.dumps(_IDENTITIES))

    @property
    def port(self) -> int:
        """Port of the S3 API; the same after a restart."""
        return self._ports[-2]

    def url(self, prefix: str, *, bucket: str = BUCKET, port: int | None = None) -> str:
        """Return a payload location in the bucket."""
        endpoint = f"http://127.0.0.1:{port or self.port}"
        return f"s3://{bucket}/{prefix}?endpoint={endpoint}&region=us-east-1"

    def store(self, prefix: str = "") -> S3Store:
        """Return a client for the bucket that does not use replaydb."""
        return S3Store(
            BUCKET,
            prefix=prefix,
            config={
                "aws_endpoint_url_s3": f"http://127.0.0.1:{self.port}",
                "access_key_id": _ADMIN["accessKey"],
                "secret_access_key": _ADMIN["secretKey"],
                "region": "us-east-1",
            },
            client_options={"allow_http": True},
            retry_config={
                "max_retries": 10_000,
                "retry_timeout": timedelta(minutes=1),
                "backoff": {
                    "init_backoff": timedelta(milliseconds=20),
                    "max_backoff": timedelta(milliseconds=50),
                    "base": 2,
                },
            },
        )

    def start(self) -> None:
        """Start the server and wait until it accepts requests. Does nothing if it is running."""
        if self._process is not None:
            return
        ports = [
            f"-{server}.port{kind}={self._ports[2 * nth + which]}"
            for nth, server in enumerate(_SERVERS)
            for which, kind in enumerate(("", ".grpc"))
        ]
        options = f"""
            -logtostderr=true mini -ip=127.0.0.1 -ip.bind=127.0.0.1 -dir={self._folder}
            -s3.config={self._folder}/s3.json -bucket={BUCKET} -admin.ui=false -webdav=false
            -s3.autoCreateBucket=false -s3.port.iceberg=0 -s3.port.lance=0
            -master.telemetry=false
        """.split()
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen([_WEED, *options, *ports], stdout=log, stderr=log)
        end = time.monotonic() + 30
        while True:
            try:
                obstore.put(self.store(), "ready", b"", use_multipart=False)
            except FileNotFoundError:  # the bucket is created shortly after the start
                assert time.monotonic() < end, "SeaweedFS has not created the bucket"
                time.sleep(0.02)
            else:
                return

    def kill(self) -> None:
        """Kill the server."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
            for port in self._ports:
                for socket_file in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):  # noqa: S108
                    socket_file.unlink()


@contextmanager
def running_s3() -> Iterator[S3Server]:
    """Run a server in the block."""
    with ExitStack() as stack:
        folder = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="replaydb-s3-", ignore_cleanup_errors=True)
        )
        server = S3Server(Path(folder))
        stack.callback(server.kill)
        server.start()
        yield server


def credentials(key: str = KEY, secret: str = SECRET) -> dict[str, str]:
    """Return the environment variables with credentials."""
    return {"AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": secret}


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [probe.getsockname()[1] for probe in probes]
