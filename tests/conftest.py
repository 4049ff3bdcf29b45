"""Fixtures of databases and stores. `url`, `store` and `buffer` exist for both engines."""

from __future__ import annotations

import asyncio
import math
import shutil
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from weakref import WeakSet

import pytest

from replaydb import Buffer, Store
from replaydb.database import migrations
from replaydb.database.postgresql.session import PostgresqlSession
from replaydb.database.repository import trajectories
from replaydb.database.repository.buffers import BufferRow
from replaydb.database.repository.locked import Found
from replaydb.database.runtime.protocol import Traits
from replaydb.database.sqlite.session import SqliteSession
from replaydb.util import loop_thread
from support.buckets import Endpoint, running_endpoint
from support.clock import Clock
from support.compiling import compile_once
from support.examples import choose_number
from support.invariants import check_invariants
from support.postgres import PostgresServer, running_server
from support.proxy import Proxy, running_proxy
from support.s3 import S3Server, credentials, running_s3

#: Not in `make quick`: tests that start servers, browsers or other processes, count draws, or read
#: whole stores.
LONG_FIXTURES = {"postgres", "_s3", "endpoint", "_browser"}
LONG_PATHS = (
    "analysis",
    "blocking/test_interrupts.py",
    "buffer/inspecting/test_find.py",
    "buffer/inspecting/test_peek.py",
    "buffer/leasing/test_lease_cancelled.py",
    "buffer/putting/test_put_together.py",
    "buffer/putting/test_uniform_eviction.py",
    "buffer/putting/test_waiting_puts.py",
    "buffer/sampling/test_corrupt.py",
    "buffer/sampling/test_extremes.py",
    "buffer/sampling/test_proportions.py",
    "buffer/sampling/test_sample_waiting.py",
    "buffer/sampling/test_seeds.py",
    "buffer/test_loader.py",
    "buffer/test_model.py",
    "buffer/test_outside.py",
    "buffer/test_processes.py",
    "buffer/test_state_machine.py",
    "buffer/test_stress.py",
    "cli",
    "codec/test_corruption.py",
    "compatibility",
    "database/engines",
    "database/migrations",
    "database/repository/test_plans.py",
    "database/repository/test_tags.py",
    "database/test_failover.py",
    "database/test_filters.py",
    "database/test_pruning.py",
    "exchange",
    "fuzz",
    "mutants",
    "operations",
    "processes",
    "project",
    "test_close.py",
    "test_memory.py",
    "test_unclosed.py",
    "torture",
    "ui",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="the tests of `make quick`")


def pytest_configure(config: pytest.Config) -> None:
    choose_number(config)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `--quick`, do not even import slow tests. None: other plugins decide."""
    name = collection_path.relative_to(Path(__file__).parent).as_posix()
    return True if config.getoption("--quick") and name in LONG_PATHS else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With `--quick`, deselect tests that need a server."""
    if config.getoption("--quick"):
        quick = [item for item in items if _is_quick(item)]
        config.hook.pytest_deselected(items=[item for item in items if not _is_quick(item)])
        items[:] = quick


def _is_quick(item: pytest.Item) -> bool:
    values = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return not (
        any(isinstance(value, str) and value == "postgresql" for value in values)
        or LONG_FIXTURES.intersection(getattr(item, "fixturenames", ()))
    )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Report all skipped tests in red, since no test should be skipped silently."""
    skipped = terminalreporter.getreports("skipped")
    if skipped:
        terminalreporter.section("DID NOT RUN", red=True)
        for reason, number in Counter(report.longrepr[2] for report in skipped).items():
            terminalreporter.write_line(f"{number} tests: {reason}", red=True)
        for report in skipped:
            terminalreporter.write_line(report.nodeid, red=True)


@pytest.fixture(scope="session", autouse=True)
def _compiling() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        compile_once(monkeypatch)
        yield


@pytest.fixture(scope="session", autouse=True)
def _quick_rereads() -> Iterator[None]:
    """Shorten the pauses before damaged payloads are read again."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("replaydb.packs.store.REREADS", (0.0, 0.01, 0.02, 0.04))
        yield


@pytest.fixture(scope="session", autouse=True)
def _untidied() -> Iterator[None]:
    """Let puts remove no packs in the background, which they do first at a random time."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("replaydb.database.payloads.TIDY_SECONDS", math.inf)
        yield


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL server, one per worker of pytest-xdist. Without one the tests fail."""
    with running_server() as server:
        yield server


@pytest.fixture(scope="session")
def _s3() -> Iterator[S3Server]:
    with running_s3() as server:
        yield server


@pytest.fixture
def s3(_s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """An S3 service, one per worker of pytest-xdist, with its credentials in the environment."""
    for name, value in credentials().items():
        monkeypatch.setenv(name, value)
    _s3.start()  # if a test has killed it
    return _s3


@pytest.fixture
async def endpoint(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Endpoint]:
    """An endpoint of two S3 services in this process, which initially routes to the right one."""
    for name, value in credentials().items():
        monkeypatch.setenv(name, value)
    async with running_endpoint() as running:
        yield running


@pytest.fixture
async def store_at_endpoint(url: str, endpoint: Endpoint) -> AsyncIterator[Store]:
    """A store with payloads at that endpoint, which does not cache them."""
    opening = Store.open(url, run="test", payloads=endpoint.url, payload_cache=0)
    async with opening as opened:
        yield opened
    endpoint.route_to(endpoint.right)
    await check_invariants(url)


@pytest.fixture(scope="session")
def _migrated_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("migrated") / "replay.db"
    asyncio.run(migrations.upgrade(f"sqlite:///{path}"))
    return path


@pytest.fixture(scope="session")
def _migrated_template(postgres: PostgresServer) -> str:
    url = postgres.create_database("template")
    asyncio.run(migrations.upgrade(url))
    return url


@pytest.fixture(scope="session")
def _migrated_database(postgres: PostgresServer, _migrated_template: str) -> str:
    return postgres.create_database("shared", _migrated_template)


@pytest.fixture
def sqlite_url(_migrated_file: Path, tmp_path: Path) -> str:
    """A migrated SQLite file without rows."""
    return f"sqlite:///{shutil.copy(_migrated_file, tmp_path / 'replay.db')}"


@pytest.fixture
def postgresql_url(_migrated_database: str, postgres: PostgresServer) -> str:
    """A migrated PostgreSQL database without rows, shared by the tests of a worker."""
    postgres.empty_tables(_migrated_database)
    return _migrated_database


@pytest.fixture
def own_postgresql_url(postgres: PostgresServer, _migrated_template: str) -> Iterator[str]:
    """A migrated PostgreSQL database for this test alone."""
    url = postgres.create_database("own", _migrated_template)
    yield url
    postgres.drop_database(url)


@pytest.fixture
def proxy(postgresql_url: str) -> Iterator[Proxy]:
    """A fault-injecting proxy to `postgresql_url`, initially without faults."""
    with running_proxy(postgresql_url) as running:
        yield running


@pytest.fixture
def proxied_url(proxy: Proxy) -> str:
    """URL of the database of `postgresql_url` through `proxy`."""
    return proxy.url


@pytest.fixture
def empty_sqlite_url(tmp_path: Path) -> str:
    """A SQLite file that does not exist yet."""
    return f"sqlite:///{tmp_path / 'empty.db'}"


@pytest.fixture
def empty_postgresql_url(postgres: PostgresServer) -> Iterator[str]:
    """A PostgreSQL database for this test alone, without tables."""
    url = postgres.create_database("empty")
    yield url
    postgres.drop_database(url)


@pytest.fixture
def from_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let draws read payloads from a snapshot, as for large payloads."""
    monkeypatch.setattr(Traits, "small_draw_bytes", -1)


@pytest.fixture(params=["in the draw", "from a snapshot"])
def reading(request: pytest.FixtureRequest) -> str:
    """Whether draws read payloads in their transaction or from a snapshot."""
    if request.param == "from a snapshot":
        request.getfixturevalue("from_snapshots")
    how: str = request.param
    return how


@pytest.fixture(params=["sqlite", "postgresql"])
def engine_name(request: pytest.FixtureRequest) -> str:
    """The engine under test."""
    name: str = request.param
    return name


@pytest.fixture
def layout() -> str:
    """Payloads are stored `inside` or `outside` the database. Tests may parametrize it."""
    return "inside"


@pytest.fixture
def url(engine_name: str, layout: str, request: pytest.FixtureRequest) -> str:
    """A migrated database without groups."""
    address: str = request.getfixturevalue(f"{engine_name}_url")
    if layout == "outside":
        folder = request.getfixturevalue("tmp_path") / "payloads"
        folder.mkdir()
        asyncio.run(_set_payloads(address, folder.as_uri()))
    return address


async def _set_payloads(url: str, payloads: str) -> None:
    async with Store.open(url, payloads=payloads):
        pass


@pytest.fixture
def own_url(engine_name: str, request: pytest.FixtureRequest) -> str:
    """A migrated database without groups for this test alone, whose tables it may change."""
    name = "sqlite_url" if engine_name == "sqlite" else "own_postgresql_url"
    address: str = request.getfixturevalue(name)
    return address


@pytest.fixture
def empty_url(engine_name: str, request: pytest.FixtureRequest) -> str:
    """A database without tables."""
    address: str = request.getfixturevalue(f"empty_{engine_name}_url")
    return address


@pytest.fixture
async def store(url: str) -> AsyncIterator[Store]:
    """An open store of the run `test`. After the test the invariants of its tables are checked."""
    async with Store.open(url, run="test") as opened:
        yield opened
    await check_invariants(url)


@pytest.fixture
async def other(url: str, store: Store) -> AsyncIterator[Store]:
    """The same database through another store, as another process would see it."""
    async with Store.open(url, run="other") as opened:
        yield opened


@pytest.fixture
async def buffer(store: Store) -> Buffer:
    """An empty buffer with default settings."""
    return await store.buffer("math")


@pytest.fixture(scope="session")
def pass_time() -> Iterator[Callable[[float], None]]:
    """A function that sets the clock of all event loops forward, so that time limits are over.

    The clock never goes back, also not after a test: what still runs would wait longer.
    """
    ahead, clock = 0.0, time.monotonic
    loops: WeakSet[asyncio.AbstractEventLoop] = WeakSet()

    def now(loop: asyncio.AbstractEventLoop | None = None) -> float:
        if loop is not None:
            loops.add(loop)
        return clock() + ahead

    def later(seconds: float) -> None:
        nonlocal ahead
        ahead += seconds
        for loop in tuple(loops):
            if not loop.is_closed():
                loop.call_soon_threadsafe(int)  # it may be asleep until its next time limit

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio.BaseEventLoop, "time", now)
        patch.setattr(loop_thread, "monotonic", now)
        yield later


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """An adjustable clock that replaces the clocks of both engines."""
    made = Clock()

    for session in (SqliteSession, PostgresqlSession):
        monkeypatch.setattr(session, "now", lambda _: made.now())
    monkeypatch.setattr(BufferRow, "time", lambda *_: made.now())
    monkeypatch.setattr(trajectories, "time_of", lambda *_: made.now())
    monkeypatch.setattr(Found, "may_have_overdue", True)  # by this clock
    return made
