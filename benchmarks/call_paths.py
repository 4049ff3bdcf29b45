"""Record the call paths of a put, a sample and a lease: functions, SQL statements and switches.

python -m benchmarks.call_paths [--database sqlite] [--write]

Counts include all threads and greenlets. Each call is made several times before it is recorded. To
measure another version of replaydb, put its `src` into PYTHONPATH.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import inspect
import json
import opcode
import re
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import greenlet
from sqlalchemy.engine.default import DefaultDialect

import replaydb as rdb
from benchmarks.databases import databases
from benchmarks.groups import SMALL, Source, put_all
from replaydb.database.postgresql.session import PostgresqlSession
from replaydb.database.sqlite.session import SqliteSession

DOCS = Path(__file__).parents[1] / "docs"
#: Recorded counts: "before" (a version of November 2026) and "now".
RECORD = DOCS / "measurements" / "call_paths.json"
PAGE = DOCS / "architecture.md"
PACKAGE = Path(rdb.__file__).parent
ENGINES = {"sqlite": "SQLite", "postgresql": "PostgreSQL"}
CALLS = ("put", "sample", "lease")
#: Groups of a sample and of a lease, of 72 KB each.
COUNT = 32
#: Time after which background work of a call, such as notifications of its commit, has ended.
SETTLE_SECONDS = 0.3

_BLOCK = re.compile(r"(?<=<!-- call-paths -->\n).*(?=<!-- /call-paths -->)", re.DOTALL)
#: Functions that pass SQL to a driver, and the names of their arguments with the SQL.
_EXECUTING: dict[CodeType, str] = {
    DefaultDialect.do_execute.__code__: "statement",
    DefaultDialect.do_executemany.__code__: "statement",
    DefaultDialect.do_execute_no_params.__code__: "statement",
}
#: The function that passes the SQL of its variable `plan` to asyncpg.
_OF_POSTGRESQL = PostgresqlSession._await.__code__
#: Functions that run the SQL of their variable `plan` with a method of SQLite's driver.
_OF_SQLITE = (SqliteSession.run.__code__, SqliteSession.run_many.__code__)
_VERB = re.compile(r"\w+")
_SUBQUERY = re.compile(r"\(SELECT[^()]*\)")  # of the policy version
_TABLE = re.compile(r"\b(?:FROM|INTO|UPDATE)\s+(\w+)")
_YIELD = opcode.opmap["YIELD_VALUE"]


@dataclasses.dataclass(slots=True)
class CallPath:
    """Counts of one call.

    Attributes:
        files: Number of files of the package whose functions were called.
        functions: Number of distinct functions that were called.
        calls: Number of function calls.
        hops: The call stack at the first statement that uses a table. Each entry is a file, a
            space, and the name of a function.
        statements: SQL statements as verb and table, without BEGIN, COMMIT and ROLLBACK.
        threads: Number of callbacks from other threads to the event loop.
        greenlets: Number of switches between greenlets.
    """

    files: int = 0
    functions: int = 0
    calls: int = 0
    hops: Sequence[str] = ()
    statements: Sequence[str] = ()
    threads: int = 0
    greenlets: int = 0


LABELS = {
    "files": "files",
    "functions": "distinct functions",
    "hops": "call depth at the first statement",
    "calls": "function calls",
    "statements": "SQL statements",
    "threads": "callbacks from other threads",
    "greenlets": "greenlet switches",
}


class Recorder:
    """Counts calls in this thread, and in threads that start while it is installed."""

    def __init__(self) -> None:
        self._path: CallPath | None = None
        self._codes: set[CodeType] = set()
        self._open: dict[FrameType, str] = {}
        self._frames: set[FrameType] = set()  # references, so that no address is used again

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Install the profiler for a block, in which all threads to observe must be started."""
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
            greenlet.settrace(None)

    async def record(self, call: Callable[[], Awaitable[object]]) -> CallPath:
        """Record a call, including its background work."""
        await asyncio.sleep(SETTLE_SECONDS)  # until background work of the previous call has ended
        for kept in (self._codes, self._open, self._frames):
            kept.clear()
        self._path = path = CallPath()
        await call()
        await asyncio.sleep(SETTLE_SECONDS)
        self._path = None
        path.functions, path.calls = len(self._codes), len(self._frames)
        path.files = len({code.co_filename for code in self._codes})
        return path

    def _profile(self, frame: FrameType, happened: str, called: Any) -> None:
        if self._path is None or happened not in ("call", "c_call", "return"):
            return
        if greenlet.gettrace() is None:  # each thread has its own
            greenlet.settrace(self._switch)
        code = frame.f_code
        if happened == "call" and code.co_name == "call_soon_threadsafe":
            self._path.threads += 1
            if frame.f_back is not None:  # it may return before or after the first statement
                self._open.pop(frame.f_back, None)
        if (sql := _passed_sql(frame, happened, called)) is not None:
            self._statement(sql)
        if happened == "c_call" or not _is_ours(code):
            return
        if happened == "call":
            self._codes.add(code)
            self._frames.add(frame)
            name = code.co_qualname.replace("<locals>.", "").replace("<lambda>", "lambda")
            self._open[frame] = f"{Path(code.co_filename).relative_to(PACKAGE).as_posix()} {name}"
        elif not _is_suspended(frame):
            self._open.pop(frame, None)

    def _switch(self, *_: object) -> None:
        if self._path is not None:
            self._path.greenlets += 1

    def _statement(self, sql: str) -> None:
        assert self._path is not None
        verb, table = _VERB.search(sql), _TABLE.search(_SUBQUERY.sub("", sql))
        if table and not self._path.hops:
            self._path.hops = tuple(self._open.values())
        self._path.statements += (f"{verb and verb[0]} {table[1] if table else ''}".rstrip(),)


def _passed_sql(frame: FrameType, happened: str, called: Any) -> str | None:
    """Return the SQL that a call passes to a driver."""
    code, sql = frame.f_code, None
    if happened == "call" and code in _EXECUTING:
        sql = frame.f_locals[_EXECUTING[code]]
    elif (happened == "call" and code is _OF_POSTGRESQL) or (
        happened == "c_call" and code in _OF_SQLITE and called.__name__.startswith("execute")
    ):
        sql = frame.f_locals["plan"].sql
    return sql


def _is_ours(code: CodeType) -> bool:
    """Whether code is a function of the package.

    Comprehensions do not count: they are functions only in some versions of Python.
    """
    is_function = not code.co_name.startswith("<") or code.co_name == "<lambda>"
    return is_function and code.co_filename.startswith(str(PACKAGE))


def _is_suspended(frame: FrameType) -> bool:
    """Whether a frame is a suspended coroutine. Generators that yield do not count."""
    code = frame.f_code
    return bool(code.co_flags & inspect.CO_COROUTINE) and code.co_code[frame.f_lasti] == _YIELD


async def call_paths(url: str, recorder: Recorder) -> AsyncIterator[tuple[str, CallPath]]:
    """Record a put, a sample, and a lease with its ack, on a database that has all tables."""
    source = Source(SMALL)
    async with rdb.Store.open(url) as store:
        buffer = await store.buffer("bench", on_ack="return", seed=0)
        await put_all(buffer, source, 2 * COUNT)

        async def put() -> None:
            await buffer.put(source.take(1))

        async def sample() -> None:
            await buffer.sample(COUNT, step=1)

        async def lease() -> None:
            async with buffer.lease(COUNT, ttl=600, step=1):
                pass

        for call in (put, sample, lease):
            for _ in range(3):
                await call()
            yield call.__name__, await recorder.record(call)


async def counted(engines: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the counts by engine and call, as JSON values."""
    recorder, found = Recorder(), {}
    with recorder.installed():
        async with databases() as made:
            for engine in engines:
                url = await made.make(engine)
                found[engine] = {
                    name: dataclasses.asdict(path) async for name, path in call_paths(url, recorder)
                }
    return found


def markdown(record: Mapping[str, Any]) -> str:
    """Return the block for the documentation: a table of the counts, and a diagram of the paths."""
    before, now = record["before"], record["now"]
    heads = [f"{ENGINES[engine]}: {name}" for engine in now for name in CALLS]
    lines = [f"| before → now | {' | '.join(heads)} |", "| --- |" + " --: |" * len(heads)]
    for key, label in LABELS.items():
        cells = [
            f"{_number(before[engine][name][key])} → {_number(now[engine][name][key])}"
            for engine in now
            for name in CALLS
        ]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    engine = next(iter(now))
    lines += ["", f"On {ENGINES[engine]}:", "", "```mermaid", "flowchart TD"]
    for name in CALLS:
        lines += [f"    subgraph {name}", *_diagram(name, now[engine][name]), "    end"]
    return "\n".join(["", *lines, "```", "", ""])


def filled(page: str, record: Mapping[str, Any]) -> str:
    """Return a page with the block between its markers replaced."""
    return _BLOCK.sub(lambda _: markdown(record), page)


def _number(found: Any) -> int:
    return found if isinstance(found, int) else len(found)


def _diagram(name: str, path: Mapping[str, Any]) -> Iterator[str]:
    """Yield the nodes of a diagram: files with their functions, and the statements at the end."""
    hops = groupby((hop.split(" ") for hop in path["hops"]), lambda hop: hop[0])
    boxes = ["<br/>".join([f"<b>{file}</b>", *(hop[1] for hop in some)]) for file, some in hops]
    statements = "<br/>".join(path["statements"])
    for i, box in enumerate(boxes):
        yield f'        {name}{i}["{box}"] --> {name}{i + 1}'
    yield f'        {name}{len(boxes)}[("{statements}")]'


def main() -> None:
    """Parse arguments, record the calls, and print or write the result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.call_paths", description=__doc__)
    parser.add_argument("--database", choices=ENGINES, help="engine (default: both)")
    parser.add_argument("--json", type=Path, help="also write the counts to this file")
    parser.add_argument(
        "--write", action="store_true", help=f"update {RECORD.name} and docs/{PAGE.name}"
    )
    arguments = parser.parse_args()
    now = asyncio.run(counted([arguments.database] if arguments.database else list(ENGINES)))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(now, indent=1) + "\n", encoding="utf8")
    record = json.loads(RECORD.read_text(encoding="utf8"))
    print(markdown(record | {"now": now}))
    if arguments.write:
        record["now"] |= now
        RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf8")
        PAGE.write_text(filled(PAGE.read_text(encoding="utf8"), record), encoding="utf8")


if __name__ == "__main__":
    main()
