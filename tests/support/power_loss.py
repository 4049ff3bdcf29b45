"""Simulated power loss: disk states replayed from a trace of the writes of a process.

`strace` records every write, flush, rename and removal below a folder. After the failure the disk
holds everything that was flushed before it, and of the rest nothing, some writes, some 4 KB sectors
of them, or the later half. Renames and removals take effect in order, as in a journaling file
system; data written to a renamed file may still be lost.
"""

from __future__ import annotations

import asyncio
import random
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

SECTOR: Final = 4096
_CALLS: Final = (
    "openat,write,writev,pwrite64,pwritev,fsync,fdatasync,ftruncate,"
    "rename,renameat,renameat2,unlink,unlinkat,mkdir,mkdirat"
)
_LINE = re.compile(rb"\d+ +(\w+)\((.*)\) += (\d+)")
_DESCRIPTOR = re.compile(rb"\d+<([^>]*)>")
_TEXT = re.compile(rb'"([^"]*)"')


@dataclass(frozen=True, slots=True)
class Operation:
    """A system call that changed a file or folder, or a line added to the log (`kind` "logged")."""

    kind: str
    path: str
    offset: int = 0
    data: bytes = b""


def is_available() -> bool:
    """Whether this machine has strace."""
    return shutil.which("strace") is not None


async def traced(command: Sequence[str], folder: Path, log: Path, trace: Path) -> list[Operation]:
    """Run a command; return its changes below `folder` and the lines it added to `log`."""
    strace = ("strace", "-f", "-y", "-xx", "-s", "100000000", "-o", str(trace), "-e", _CALLS)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*strace, *command, stderr=pipe)
    _, problem = await process.communicate()
    assert process.returncode == 0, problem.decode()
    with trace.open("rb") as lines:
        return [each for line in lines for each in _operations(line, str(folder), str(log))]


def _operations(line: bytes, folder: str, log: str) -> Iterator[Operation]:
    """Parse a line of the trace. Failed calls and calls on other files are ignored."""
    if not (call := _LINE.match(line)):
        return
    name, arguments, result = call[1].decode(), call[2], int(call[3])
    texts = [_unhexed(text) for text in _TEXT.findall(arguments)]
    on = _DESCRIPTOR.match(arguments)
    path = _unhexed(on[1]).decode() if on else (texts[0].decode() if texts else "")
    if name == "openat":
        path = texts[0].decode()
        flags = arguments.rsplit(b'"', 1)[1]
        if b"O_CREAT" in flags and _is_kept(path, folder):
            yield Operation("truncate" if b"O_TRUNC" in flags else "create", path)
    elif path == log and name == "write":
        yield Operation("logged", path, data=texts[0])
    elif not _is_kept(path, folder):
        return
    elif name in ("write", "writev", "pwrite64", "pwritev"):
        data = b"".join(texts)[:result]
        assert len(data) == result, "strace has truncated the data"
        offset = int(arguments.rsplit(b", ", 1)[1]) if name.startswith("p") else -1
        yield Operation("write", path, offset, data)
    elif name in ("fsync", "fdatasync"):
        yield Operation("flush", path)
    elif name == "ftruncate":
        yield Operation("truncate", path, int(arguments.rsplit(b", ", 1)[1]))
    elif name.startswith("rename"):
        yield Operation("rename", path, data=texts[1])
    else:
        yield Operation(name.removesuffix("at"), path)


def _is_kept(path: str, folder: str) -> bool:
    """Whether a file must survive. SQLite rebuilds its shared-memory index after a crash."""
    return path.startswith(folder) and not path.endswith("-shm")


def _unhexed(text: bytes) -> bytes:
    return bytes.fromhex(text.replace(b"\\x", b"").decode())


class Disk:
    """Files after the operations so far, and their unflushed writes."""

    def __init__(self) -> None:
        self.files: dict[str, bytearray] = {}
        self.folders: list[str] = []
        self._ends: defaultdict[str, int] = defaultdict(int)
        self._unflushed: defaultdict[str, list[Operation]] = defaultdict(list)

    def do(self, one: Operation) -> None:
        """Apply the next operation of the trace."""
        match one.kind:
            case "create" | "truncate" | "write":
                self.files.setdefault(one.path, bytearray())
                if one.kind == "write":
                    at = self._ends[one.path] if one.offset < 0 else one.offset
                    one = Operation("write", one.path, at, one.data)
                    self._ends[one.path] = at + len(one.data)
                if one.kind != "create":
                    self._unflushed[one.path].append(one)
            case "flush":
                for each in self._unflushed.pop(one.path, []):
                    self._reach(each)
            case "rename":
                new = one.data.decode()
                self.files[new] = self.files.pop(one.path)
                waiting = self._unflushed.pop(one.path, [])
                self._unflushed[new] = [replace(each, path=new) for each in waiting]
            case "unlink":
                self.files.pop(one.path, None)
                self._unflushed.pop(one.path, None)
            case "mkdir":
                self.folders.append(one.path)

    def fail(self, chance: random.Random) -> str:
        """Lose power; some unflushed writes reach the files. Returns how they were chosen."""
        how = chance.choice(["nothing", "some writes", "some sectors", "the later half"])
        for waiting in self._unflushed.values():
            for number, one in enumerate(waiting):
                if how == "some sectors" and one.kind == "write":
                    for each in _sectors(one):
                        if chance.random() < 0.7:
                            self._reach(each)
                elif (how == "some writes" and chance.random() < 0.5) or (
                    how == "the later half" and number >= len(waiting) // 2
                ):
                    self._reach(one)
        return how

    def save(self, moved: Callable[[str], Path]) -> None:
        """Write the files to the paths that `moved` returns."""
        for folder in self.folders:
            moved(folder).mkdir(parents=True, exist_ok=True)
        for path, content in self.files.items():
            moved(path).write_bytes(content)

    def _reach(self, one: Operation) -> None:
        file = self.files[one.path]
        if len(file) < one.offset:
            file.extend(bytes(one.offset - len(file)))
        if one.kind == "write":
            file[one.offset : one.offset + len(one.data)] = one.data
        else:
            del file[one.offset :]


def _sectors(one: Operation) -> Iterator[Operation]:
    for start in range(0, len(one.data), SECTOR):
        yield Operation("write", one.path, one.offset + start, one.data[start : start + SECTOR])
