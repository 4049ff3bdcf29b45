"""Arrow tables of a store: contents, filters, lazy reading and Arrow readers."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
import pytest
from sqlalchemy import text

import replaydb as rdb
from replaydb import Buffer, Episode, EpisodeGroup, Store, analysis
from replaydb.analysis import arrow, decoded, source, tables
from replaydb.errors import (
    CorruptPayloadError,
    DatabaseError,
    InvalidInputError,
    NotSupportedError,
    UnknownBufferError,
)
from support.agents import chain
from support.connections import transaction
from support.engines import postgresql_nightly
from support.groups import episode, group, groups

Table = Callable[..., analysis.Rows]
OF_GROUPS: list[Table] = [
    *(analysis.groups, analysis.episodes, analysis.turns, analysis.tokens, analysis.prompts),
    analysis.annotation_history,
]
ALL: list[Table] = [*OF_GROUPS, analysis.draws, analysis.policies, analysis.runs]
BY_TABLE = pytest.mark.parametrize("table", ALL, ids=lambda table: table.__name__)


def use_windows(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Scan tables in windows of this size, and one draw at a time."""
    monkeypatch.setattr(tables, "WINDOW", size)
    monkeypatch.setattr(decoded, "WINDOW", size)
    monkeypatch.setattr(tables, "DRAWS", 1)


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use many pages, which end within groups and draws."""
    monkeypatch.setattr(source, "PAGE", 3)
    use_windows(monkeypatch, 2)


@pytest.fixture(params=["in one page", "in many"])
def pages(request: pytest.FixtureRequest) -> str:
    """Whether tables are read in one page or in many."""
    if request.param == "in many":
        request.getfixturevalue("small_pages")
    how: str = request.param
    return how


async def fill(store: Store) -> list[int]:
    """Fill a store: seven groups of two episodes in `math`, two draws, and another buffer."""
    buffer = await store.buffer("math")
    for version in (1, 2, 2, 5):
        await buffer.advance_policy(version)
    ids = await buffer.put(
        [group(f"a-{i}", "gsm8k" if i % 2 else "math", prompt_uid=f"p{i % 3}", version=i,
               tags={"level": i, "ключ": "ø'"}) for i in range(7)]
    )  # fmt: skip
    await buffer.sample(3, rdb.Fifo(), step=1)
    await buffer.sample(4, rdb.Fifo(), step=2)
    episodes = [episode(None), episode(0.5), Episode(turns=chain(3), reward=1.0)]
    code = await store.buffer("code")
    await code.put(EpisodeGroup("gsm8k", episodes, group_uid="b"))
    for uids in (("a-0", "a-1"), ("a-1", "a-2")):  # values of a-1 are not added again
        await buffer.annotate(
            [rdb.Annotation(uid, 1, advantage=0.5, metadata={"label": "ø'"}) for uid in uids],
            author="judge",
        )
    await code.annotate([
        rdb.Annotation("b", 2, reward=2.0), rdb.Annotation("b", 2, turn=1, reward=1.0)
    ])  # fmt: skip
    return ids


QUERIES = {
    "groups": "SELECT * FROM group_overview ORDER BY group_id",
    "episodes": "SELECT * FROM episode_overview ORDER BY group_id, position",
    "turns": "SELECT * FROM turn_overview ORDER BY group_id, position, turn",
    "annotation_history": (
        "SELECT * FROM annotation_history"
        " ORDER BY group_id, number, position, coalesce(turn, -1), name"
    ),
    "draws": "SELECT * FROM training_history ORDER BY draw_id, position",
    "prompts": "SELECT * FROM prompt_overview ORDER BY buffer_name DESC, prompt_uid, task_name",
    "policies": "SELECT * FROM policy_overview ORDER BY change_id",
}


async def view(url: str, name: str) -> list[dict[str, Any]]:
    async with transaction(url) as connection:
        rows = (await connection.execute(text(QUERIES[name]))).all()
    return [row._asdict() for row in rows]


def as_sql(rows: list[dict[str, Any]], like: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Convert times to the strings that the driver of SQLite returns."""
    return [
        {
            name: value
            if not isinstance(value, datetime) or isinstance(other.get(name), datetime)
            else f"{value:%Y-%m-%d %H:%M:%S.%f}"
            for name, value in row.items()
            if name in other
        }
        for row, other in zip(rows, like, strict=True)
    ]


@pytest.mark.usefixtures("pages")
@pytest.mark.parametrize(
    "table",
    [
        *OF_GROUPS[:2],
        analysis.annotation_history,
        analysis.draws,
        analysis.prompts,
        analysis.policies,
    ],
    ids=lambda one: one.__name__,
)
async def test_a_table_is_its_view(store: Store, url: str, table: Table) -> None:
    await fill(store)
    seen = await view(url, table.__name__)
    rows = table(url).to_table()
    rows.validate(full=True)
    assert rows.schema == table(url).schema
    assert set(seen[0]) <= set(rows.column_names)
    found = as_sql(rows.to_pylist(), seen)
    for row in (*found, *seen):
        for name in row.keys() & {"tags", "metadata", "changes"}:
            row[name] = json.loads(row[name]) if isinstance(row[name], str) else row[name]
    assert found == seen


@pytest.mark.usefixtures("small_pages")
async def test_every_episode_has_its_own_text(store: Store, url: str) -> None:
    buffer = await store.buffer("math")
    texts = ["first", None, "third ø", ""]
    rewarded = [episode(float(i), text=one) for i, one in enumerate(texts)]
    await buffer.put([rdb.EpisodeGroup("gsm8k", rewarded[at : at + 2]) for at in (0, 2)])
    rows = analysis.episodes(url).to_table()
    assert rows["reward"].to_pylist() == [0.0, 1.0, 2.0, 3.0]
    assert rows["text"].to_pylist() == texts


@pytest.mark.usefixtures("small_pages")
async def test_prompts(store: Store, url: str) -> None:
    await fill(store)
    rows = analysis.prompts(url, buffer="math").to_table()
    assert rows["first_put_at"].type == pa.timestamp("us", tz="UTC")
    known = rows.drop_columns(["first_put_at", "last_put_at", "buffer_name"]).to_pylist()
    assert [tuple(row.values())[:10] for row in known] == [
        # task, prompt, groups, episodes, tokens, rewards, versions
        ("gsm8k", "p0", 1, 2, 10, 0.5, 0.0, 1.0, 3, 3),
        ("math", "p0", 2, 4, 20, 0.5, 0.0, 1.0, 0, 6),
        ("gsm8k", "p1", 1, 2, 10, 0.5, 0.0, 1.0, 1, 1),
        ("math", "p1", 1, 2, 10, 0.5, 0.0, 1.0, 4, 4),
        ("gsm8k", "p2", 1, 2, 10, 0.5, 0.0, 1.0, 5, 5),
        ("math", "p2", 1, 2, 10, 0.5, 0.0, 1.0, 2, 2),
    ]
    drawn = Counter(
        f"{row['task_name']} {row['prompt_uid']}"
        for row in analysis.draws(url).to_table().to_pylist()
    )
    assert {f"{row['task_name']} {row['prompt_uid']}": row["times_trained"] for row in known
            if row["times_trained"]} == drawn  # fmt: skip
    assert sum(row["times_sampled"] for row in known) == 7


@pytest.mark.usefixtures("small_pages")
async def test_policies_are_listed_by_version(store: Store, other: Store, url: str) -> None:
    """One row for each change of version, with run and end, including rewinds and take-overs."""
    await fill(store)
    buffer = await store.buffer("math")
    await buffer.advance_policy(3, rewind=True)
    await (await other.buffer("math")).advance_policy(0, take_over=True)
    await (await store.buffer("code")).advance_policy(7)
    rows = analysis.policies(url).to_table().to_pylist()
    names = ("buffer_name", "run_name", "lineage", "policy_version")
    assert [tuple(row[name] for name in names) for row in rows] == [
        ("math", "test", "test", 1),
        ("math", "test", "test", 2),
        ("math", "test", "test", 5),
        ("math", "test", "test", 3),
        ("math", "other", "other", 0),
        ("code", "test", "test", 7),
    ]
    assert [row["ended_at"] for row in rows] == [
        *(row["began_at"] for row in rows[1:5]), None, None
    ]  # fmt: skip
    assert analysis.policies(url, buffer="code").to_table().num_rows == 1
    # The lineage of groups is still known.
    seen = analysis.groups(url, buffer="math").to_table().to_pylist()
    assert {row["comparable_version"] for row in seen} == {None}
    assert [(row["run_lineage"], row["min_policy_version"]) for row in seen] == [
        ("test", version) for version in range(7)
    ]
    trained = analysis.draws(url).to_table().to_pylist()
    assert {row["group_run_lineage"] for row in trained} == {"test"}


@pytest.mark.usefixtures("small_pages")
async def test_filters(store: Store, other: Store, url: str) -> None:
    ids = await fill(store)
    await (await other.buffer("math")).put(group("c", "gsm8k", status="failed"))

    def uids(table: Table = analysis.groups, **which: Any) -> list[str]:
        return list(dict.fromkeys(table(url, **which).to_table()["group_uid"].to_pylist()))

    assert uids() == [f"a-{i}" for i in range(7)] + ["b", "c"]
    assert uids(buffer="code") == ["b"]
    assert uids(buffer=["code", "math"], runs="other") == ["c"]
    assert uids(tasks="math") == ["a-0", "a-2", "a-4", "a-6"]
    assert uids(statuses=["failed"]) == ["c"]
    assert uids(analysis.tokens, where=rdb.col.min_policy_version >= 5) == ["a-5", "a-6"]
    assert uids(where=rdb.col.tags["level"].as_integer() == 3) == ["a-3"]
    episodes = analysis.episodes(url, tasks="gsm8k", buffer="math", runs="test").to_table()
    assert episodes["group_id"].to_pylist() == [n for n in ids[1::2] for _ in range(2)]
    drawn = analysis.draws(url).to_table()["group_id"].to_pylist()
    of_math = analysis.draws(url, tasks="math").to_table()["group_id"].to_pylist()
    assert of_math == [one for one in drawn if one in ids[0::2]] != []
    assert analysis.draws(url, runs="other").to_table().num_rows == 0
    assert analysis.draws(url, buffer="code").to_table().num_rows == 0
    added = await (await other.buffer("math")).annotate(rdb.Annotation("c", 1, reward=9.0))
    assert added.keys() == {"c"}

    def annotated(**which: Any) -> list[tuple[Any, ...]]:
        rows = analysis.annotation_history(url, **which).to_table().to_pylist()
        return [(row["buffer_name"], row["turn"], row["name"], row["value"]) for row in rows]

    of_b = [("code", None, "reward", 2.0), ("code", 1, "reward", 1.0)]
    assert annotated(buffer="code") == of_b
    assert (
        annotated(runs="other") == [("math", None, "reward", 9.0)] == annotated(statuses="failed")
    )
    assert annotated(tasks="gsm8k", where=rdb.col.reward_max > 1, runs="test") == of_b
    assert len(annotated(tasks="math")) == 4  # of a-0 and a-2
    assert analysis.prompts(url, where=rdb.col.prompt_uid == "p1").to_table().num_rows == 2
    assert analysis.runs(url).to_table()["run_name"].to_pylist() == ["test", "other"]


@postgresql_nightly
@BY_TABLE
async def test_arrow_readers_accept_rows(store: Store, url: str, table: Table) -> None:
    await fill(store)
    rows = table(url)
    count = rows.to_table().num_rows
    assert count > 0
    assert rows.reader().read_all() == rows.to_table()
    assert pa.table(rows) == rows.to_table()
    assert len(rows.to_pandas()) == count
    assert len(pl.DataFrame(rows)) == count
    with duckdb.connect() as connection:
        connection.register("stored", rows)
        for _ in range(2):  # each query reads again
            assert connection.sql("SELECT count(*) FROM stored").fetchall() == [(count,)]
    assert rows.schema.names[0] in repr(rows)


async def test_times_are_times(buffer: Buffer, url: str) -> None:
    before = datetime.now(UTC)
    await buffer.put(group(tags={"level": "hard"}))
    [row] = analysis.groups(url).to_table().to_pylist()
    assert abs(row["created_at"] - before) < timedelta(minutes=1)
    assert row["created_at"].utcoffset() == timedelta(0)
    frame = analysis.groups(url).to_pandas()
    assert str(frame["created_at"].dtype) == "datetime64[us, UTC]"
    with duckdb.connect() as connection:
        connection.register("groups", analysis.groups(url))
        found = connection.sql("SELECT tags ->> 'level', extract(year FROM created_at) FROM groups")
        assert found.fetchall() == [("hard", before.year)]


@postgresql_nightly
@BY_TABLE
async def test_columns_do_not_depend_on_what_is_stored(
    store: Store, url: str, table: Table
) -> None:
    empty = table(url).to_table()
    await fill(store)
    assert table(url).to_table().schema == empty.schema == table(url).schema


@postgresql_nightly
@BY_TABLE
async def test_rows_are_read_page_by_page(
    store: Store, url: str, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page is read when it is requested; only one page is in memory at a time."""
    monkeypatch.setattr(source, "PAGE", 2)
    monkeypatch.setattr(decoded, "CHUNK_GROUPS", 2)
    use_windows(monkeypatch, 1)
    await fill(store)
    reads = []
    read = source.Source.read

    def counted(self: source.Source, work: Any) -> Any:
        reads.append(work)
        return read(self, work)

    monkeypatch.setattr(source.Source, "read", counted)
    with table(url).reader() as reader:
        first = reader.read_next_batch()
        begun = len(reads)
        rest = reader.read_all()
    assert first.num_rows <= 4
    assert begun <= (9 if table is analysis.turns else 6)  # only the last group has turns
    assert table is analysis.runs or len(reads) > begun
    assert first.num_rows + rest.num_rows == table(url).to_table().num_rows


@pytest.mark.usefixtures("small_pages")
async def test_a_filter_for_few_rows_reads_only_their_windows(
    store: Store, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = await fill(store)
    reads = []
    read = source.Source.read

    def counted(self: source.Source, work: Any) -> Any:
        reads.append(work)
        return read(self, work)

    monkeypatch.setattr(source.Source, "read", counted)

    def num_reads(rows: analysis.Rows) -> int:
        reads.clear()
        assert rows.to_table().num_rows > 0
        return len(reads)

    for table in (analysis.groups, analysis.episodes, analysis.tokens):
        every = num_reads(table(url))
        for where in (
            rdb.col.id == ids[5],
            rdb.col.id.in_(ids[5:6]),
            (rdb.col.id > ids[4]) & (rdb.col.num_tokens > 0) & (rdb.col.id <= ids[5]),
        ):
            few = table(url, where=where)
            assert set(few.to_table()["group_id"].to_pylist()) == {ids[5]}
            assert num_reads(few) <= 3 < every
        everything_but = table(url, where=(rdb.col.id != ids[5]) | (rdb.col.id == ids[4]))
        assert len(set(everything_but.to_table()["group_id"].to_pylist())) == len(ids)
    few = analysis.prompts(url, buffer="math", where=rdb.col.prompt_uid == "p2")
    assert set(few.to_table()["prompt_uid"].to_pylist()) == {"p2"}
    assert num_reads(few) <= 4 < num_reads(analysis.prompts(url, buffer="math"))


async def no_transaction_is_open(url: str, engine_name: str) -> bool:
    """Whether no transaction is open: SQLite can empty the WAL; the server lists none."""
    if engine_name == "sqlite":
        with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as file:
            [(busy, size, moved)] = file.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return (busy, size, moved) == (0, 0, 0)
    begun = (
        "SELECT count(*) FROM pg_stat_activity WHERE state LIKE 'idle in transaction%'"
        " AND datname = current_database() AND pid <> pg_backend_pid()"
    )
    async with transaction(url) as connection:
        number: int = (await connection.exec_driver_sql(begun)).scalar_one()
    return number == 0


@pytest.mark.parametrize("layout", ["inside", "outside"])
async def test_a_paused_reader_keeps_no_transaction_open(
    store: Store, url: str, engine_name: str, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    use_windows(monkeypatch, 1)
    monkeypatch.setattr(decoded, "CHUNK_GROUPS", 1)
    buffer = await store.buffer("math")
    await buffer.put(groups(5))
    with analysis.tokens(url).reader() as reader:
        first = reader.read_next_batch()
        await buffer.put(groups(3, "later"))
        await buffer.delete(uids="gsm8k-3")
        assert await no_transaction_is_open(url, engine_name)
        rest = reader.read_all()
    found = [*first["group_uid"].to_pylist(), *rest["group_uid"].to_pylist()]
    # Without groups put after the reading began, or deleted before their page was read.
    assert list(dict.fromkeys(found)) == [f"gsm8k-{i}" for i in (0, 1, 2, 4)]


def test_works_without_an_event_loop(sqlite_url: str) -> None:
    asyncio.run(_put_some(sqlite_url))
    assert analysis.groups(sqlite_url).to_table().num_rows == 3
    reader = analysis.groups(sqlite_url).reader()
    del reader  # never read


async def _put_some(url: str) -> None:
    async with Store.open(url) as store:
        await (await store.buffer("math")).put(groups(3))


@BY_TABLE
def test_a_missing_store_is_not_created(tmp_path: Path, table: Table) -> None:
    with pytest.raises(DatabaseError, match=r"missing\.db"):
        table(f"sqlite:///{tmp_path / 'missing.db'}")
    assert list(tmp_path.iterdir()) == []


@postgresql_nightly
@pytest.mark.parametrize("table", [*OF_GROUPS, analysis.draws], ids=lambda table: table.__name__)
async def test_invalid_arguments(buffer: Buffer, url: str, table: Table) -> None:
    with pytest.raises(UnknownBufferError, match="mth"):
        table(url, buffer="mth")
    assert [info.name for info in await _buffers(url)] == [buffer.name]
    for which in ({"tasks": 3}, {"where": "reward > 1"}, {"buffer": [1]}, {"runs": b"x"}):
        with pytest.raises(InvalidInputError, match=next(iter(which))):
            table(url, **which)


async def _buffers(url: str) -> list[rdb.BufferInfo]:
    async with Store.open(url, read_only=True) as store:
        return await store.buffers()


async def test_an_unreadable_row(sqlite_url: str) -> None:
    """SQLite accepts any value in any column."""
    async with Store.open(sqlite_url) as store:
        bad, good = await (await store.buffer("math")).put(groups(2))
    async with transaction(sqlite_url) as connection:
        for damage in (
            "UPDATE episode_group SET created_at = 'noon', reward_mean = 'high' WHERE id = 1",
            "UPDATE episode SET reward = x'ff' WHERE group_id = 1 AND position = 1",
        ):
            await connection.exec_driver_sql(damage)
        await connection.commit()
    for table in (analysis.groups, analysis.episodes):
        rows = table(sqlite_url)
        with pytest.raises(CorruptPayloadError, match="cannot be read") as raised:
            rows.to_table()
        assert raised.value.group_ids == (bad,)
        left = table(sqlite_url, damaged="skip").to_table()["group_id"].to_pylist()
        assert left == ([good] if table is analysis.groups else [bad, good, good])
    with pytest.raises(InvalidInputError, match="damaged"):
        analysis.groups(sqlite_url, damaged="ignore")  # type: ignore[arg-type]


async def test_pages_are_cut_by_their_bytes(
    buffer: Buffer, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page has several small rows, or one large row. No row is omitted."""
    sizes = [10, 900, 10, 10, 5000, 10, 900]
    for i, size in enumerate(sizes):
        one = episode(text="x" * size, metadata={"note": "y" * (size // 9)})
        await buffer.put(EpisodeGroup("t", [one], group_uid=f"{i}", tags={"note": "é" * size}))
    whole = {table: table(url).to_table() for table in ALL}
    monkeypatch.setattr(source, "PAGE_BYTES", 2000)
    for table in ALL:
        assert table(url).to_table().equals(whole[table])
    for table in (analysis.groups, analysis.episodes):
        pages = [batch.num_rows for batch in table(url).reader()]
        assert max(pages) > 1
        assert len(pages) > 2
        assert all(batch.num_rows == 1 or batch.nbytes < 8000 for batch in table(url).reader())


@pytest.mark.nightly
async def test_more_text_than_an_arrow_column_can_have(tmp_path: Path) -> None:
    """A column of text has at most 2 GiB in a batch. More is neither an error nor damage."""
    url = f"sqlite:///{tmp_path / 'large.db'}"
    async with Store.open(url) as store:
        buffer = await store.buffer("math")
        for _ in range(37):
            await buffer.put(EpisodeGroup("t", [episode(text="x" * 60_000_000)]))
    sizes = [batch["text"].nbytes for batch in analysis.episodes(url).reader()]
    assert sum(sizes) > 2**31
    assert max(sizes) < 2**28


async def test_rows_that_are_only_too_large_together_are_not_damaged(
    buffer: Buffer, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await buffer.put(groups(2))
    whole = arrow._batch

    def limited(schema: pa.Schema, rows: Any) -> pa.RecordBatch:
        if len(rows) > 1:
            raise TypeError("Cannot convert pyarrow.lib.ChunkedArray to pyarrow.lib.Array")
        return whole(schema, rows)

    monkeypatch.setattr(arrow, "_batch", limited)
    for damaged in ("raise", "skip"):
        with pytest.raises(TypeError, match="ChunkedArray"):
            analysis.groups(url, damaged=damaged).to_table()


def test_a_missing_pyarrow_is_reported() -> None:
    code = "import sys; sys.modules['pyarrow'] = None; import replaydb.analysis"
    outcome = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "pip install 'replaydb[analysis]'" in outcome.stderr
    assert NotSupportedError.__name__ in outcome.stderr


async def test_dropped_episodes_keep_their_rows(store: Store, url: str) -> None:
    buffer = await store.buffer("math", archived_payload="drop", max_times_sampled=1)
    await buffer.put(EpisodeGroup("math", [episode(1.0), episode(0.0)]))
    await buffer.sample(1)
    assert analysis.episodes(url).to_table()["reward"].to_pylist() == [1.0, 0.0]
    assert analysis.tokens(url).to_table().num_rows == 0
