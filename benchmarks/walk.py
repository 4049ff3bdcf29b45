"""The way of a call: what one put, one sample and one lease pass through, counted by a profiler.

python -m benchmarks.walk [--database sqlite] [--write]

It counts in all threads and greenlets, on a store that has made every call before. To walk through
another version of replaydb, put its `src` into PYTHONPATH.
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
from replaydb.database import prepared

DOCS = Path(__file__).parents[1] / "docs"
#: What was counted: "before", of a version of November 2026, and "now".
RECORD = DOCS / "measurements" / "walk.json"
PAGE = DOCS / "architecture.md"
PACKAGE = Path(rdb.__file__).parent
ENGINES = {"sqlite": "SQLite", "postgresql": "PostgreSQL"}
CALLS = ("put", "sample", "lease")
#: Groups of a sample and of a lease, of 72 KB each.
COUNT = 32
#: What a call leaves running, such as telling others of its commit, is over after so long.
AFTERMATH_SECONDS = 0.3

_PLACE = re.compile(r"(?<=<!-- walk -->\n).*(?=<!-- /walk -->)", re.DOTALL)
#: Where SQL is handed to a driver, and the name it has there.
_HANDED_OVER: dict[CodeType, str] = {
    DefaultDialect.do_execute.__code__: "statement",
    DefaultDialect.do_executemany.__code__: "statement",
    DefaultDialect.do_execute_no_params.__code__: "statement",
    prepared._run.__code__: "sql",
}
_VERB = re.compile(r"\w+")
_LOOKED_UP = re.compile(r"\(SELECT[^()]*\)")  # the policy version, beside what is read
_TABLE = re.compile(r"\b(?:FROM|INTO|UPDATE)\s+(\w+)")
_YIELD = opcode.opmap["YIELD_VALUE"]


@dataclasses.dataclass(slots=True)
class Walk:
    """What one call passed through.

    Attributes:
        files: Files of the package that were entered.
        functions: Its distinct functions that were entered.
        calls: How often these were entered.
        hops: Those on the way to the first statement that uses a table: entered, and not yet left.
            Each is its file, a space, and its name.
        statements: SQL statements, as a verb and a table, apart from BEGIN, COMMIT and ROLLBACK.
        threads: Answers of other threads to the event loop.
        greenlets: Switches between greenlets.
    """

    files: int = 0
    functions: int = 0
    calls: int = 0
    hops: Sequence[str] = ()
    statements: Sequence[str] = ()
    threads: int = 0
    greenlets: int = 0


LABELS = {
    "files": "files entered",
    "functions": "functions entered",
    "hops": "functions on the way to the first statement",
    "calls": "calls of functions",
    "statements": "SQL statements",
    "threads": "answers from other threads",
    "greenlets": "greenlet switches",
}


class Walker:
    """Counts what happens in this thread, and in those that start while it is installed."""

    def __init__(self) -> None:
        self._walk: Walk | None = None
        self._codes: set[CodeType] = set()
        self._open: dict[FrameType, str] = {}
        self._seen: set[FrameType] = set()  # kept, so that no other frame takes their place

    @contextmanager
    def installed(self) -> Iterator[None]:
        """For a block, which is to start all threads that are to be observed."""
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
            greenlet.settrace(None)

    async def walk(self, call: Callable[[], Awaitable[object]]) -> Walk:
        """What a call passes through, together with what it leaves running."""
        await asyncio.sleep(AFTERMATH_SECONDS)  # of the call before
        for kept in (self._codes, self._open, self._seen):
            kept.clear()
        self._walk = walk = Walk()
        await call()
        await asyncio.sleep(AFTERMATH_SECONDS)
        self._walk = None
        walk.functions, walk.calls = len(self._codes), len(self._seen)
        walk.files = len({code.co_filename for code in self._codes})
        return walk

    def _profile(self, frame: FrameType, happened: str, _: object) -> None:
        if self._walk is None or happened not in ("call", "return"):
            return
        if greenlet.gettrace() is None:  # each thread has its own
            greenlet.settrace(self._switch)
        code = frame.f_code
        if happened == "call" and code.co_name == "call_soon_threadsafe":
            self._walk.threads += 1
        if happened == "call" and code in _HANDED_OVER:
            self._statement(frame.f_locals[_HANDED_OVER[code]])
        if not _is_ours(code):
            return
        if happened == "call":
            self._codes.add(code)
            self._seen.add(frame)
            name = code.co_qualname.replace("<locals>.", "").replace("<lambda>", "lambda")
            self._open[frame] = f"{Path(code.co_filename).relative_to(PACKAGE).as_posix()} {name}"
        elif not _is_suspended(frame):
            self._open.pop(frame, None)

    def _switch(self, *_: object) -> None:
        if self._walk is not None:
            self._walk.greenlets += 1

    def _statement(self, sql: str) -> None:
        assert self._walk is not None
        verb, table = _VERB.search(sql), _TABLE.search(_LOOKED_UP.sub("", sql))
        if table and not self._walk.hops:
            self._walk.hops = tuple(self._open.values())
        self._walk.statements += (f"{verb and verb[0]} {table[1] if table else ''}".rstrip(),)


def _is_ours(code: CodeType) -> bool:
    """A function of the package; comprehensions are functions in some versions of Python only."""
    is_function = not code.co_name.startswith("<") or code.co_name == "<lambda>"
    return is_function and code.co_filename.startswith(str(PACKAGE))


def _is_suspended(frame: FrameType) -> bool:
    """Whether a coroutine that gives way will go on. Generators that yield are off the way."""
    code = frame.f_code
    return bool(code.co_flags & inspect.CO_COROUTINE) and code.co_code[frame.f_lasti] == _YIELD


async def walks(url: str, walker: Walker) -> AsyncIterator[tuple[str, Walk]]:
    """One put, one sample, and one lease with its ack, on a database that has all tables."""
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
            yield call.__name__, await walker.walk(call)


async def counted(engines: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Walks by engine and call, as JSON has them."""
    walker, found = Walker(), {}
    with walker.installed():
        async with databases() as made:
            for engine in engines:
                url = await made.make(engine)
                found[engine] = {
                    name: dataclasses.asdict(walk) async for name, walk in walks(url, walker)
                }
    return found


def markdown(record: Mapping[str, Any]) -> str:
    """What is in the documentation: a table of before and now, and today's ways, drawn."""
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
        lines += [f"    subgraph {name}", *_way(name, now[engine][name]), "    end"]
    return "\n".join(["", *lines, "```", "", ""])


def filled(page: str, record: Mapping[str, Any]) -> str:
    """A page with what was counted between its marks."""
    return _PLACE.sub(lambda _: markdown(record), page)


def _number(found: Any) -> int:
    return found if isinstance(found, int) else len(found)


def _way(name: str, walk: Mapping[str, Any]) -> Iterator[str]:
    """Nodes of a drawing, each a file and its functions, and the statements at the end."""
    hops = groupby((hop.split(" ") for hop in walk["hops"]), lambda hop: hop[0])
    boxes = ["<br/>".join([f"<b>{file}</b>", *(hop[1] for hop in some)]) for file, some in hops]
    statements = "<br/>".join(walk["statements"])
    for i, box in enumerate(boxes):
        yield f'        {name}{i}["{box}"] --> {name}{i + 1}'
    yield f'        {name}{len(boxes)}[("{statements}")]'


def main() -> None:
    """Parse arguments, walk, print or write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.walk", description=__doc__)
    parser.add_argument("--database", choices=ENGINES, help="default: both")
    parser.add_argument("--json", type=Path, help="write what was counted to this file")
    parser.add_argument("--write", action="store_true", help=f"keep it in docs/{PAGE.name}")
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
