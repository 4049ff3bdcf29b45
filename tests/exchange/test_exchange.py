"""Export and import of groups, interruptions, and the commands."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import duckdb
import polars as pl
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

import replaydb as rdb
from replaydb import Buffer, Episode, EpisodeGroup, Store, StoredGroup, Turn, analysis
from replaydb.analysis import decoded_groups
from replaydb.errors import (
    DatabaseUnavailableError,
    InvalidInputError,
    InvalidURLError,
    PayloadsUnavailableError,
    UnknownBufferError,
)
from replaydb.exchange import (
    ExportReport,
    ImportReport,
    export_groups,
    exporting,
    import_groups,
    importing,
)
from replaydb.exchange.manifest import NAME
from support.command import run
from support.engines import postgresql_nightly
from support.groups import GENERATED, conversation, episode, group, groups
from support.s3 import S3Server


def content(one: EpisodeGroup) -> Any:
    return one.episodes, one.context


def branches() -> Episode:
    """Return an episode of turns by parent, with an extra that has no values of last tokens."""
    first = Turn(prompt_ids=range(50), response_ids=[1, 2], token_extras={"x": range(51)})
    second = Turn(parent=first, new_ids=[3], response_ids=[4], token_extras={"x": range(53)})
    return Episode(
        turns=[first, second, Turn(parent=first, prompt_ids=range(40), response_ids=[5])]
    )


@pytest.fixture(params=["folder", "bucket"])
def destination(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A folder or bucket to export to."""
    if request.param == "folder":
        return str(tmp_path / "export")
    server: S3Server = request.getfixturevalue("s3")
    return server.url(f"exports/{uuid4().hex}")


async def fill(store: Store) -> list[StoredGroup]:
    """Fill a store with groups of every status and form, in two buffers and three tasks."""
    buffer = await store.buffer("math / 数学", max_staleness=None)
    await buffer.put(
        [
            *groups(4, prompt_uid="p", tags={"level": "hard", "n": [1, None]}),
            EpisodeGroup("a/b %", [conversation(), episode(None, 3, text=GENERATED)], priority=0.5),
            EpisodeGroup("a/b %", [], status="aborted", prompt="roll me", expected_episodes=8),
            EpisodeGroup("a/b %", [], status="failed"),
            group("filtered", status="filtered"),
            EpisodeGroup("a/b %", [branches()]),
            EpisodeGroup("a/b %", [episode(3e38), episode(-3e38)]),  # near the limits of float32
        ]
    )
    await buffer.open_group("open", "open", 3, prompt=[{"role": "user", "content": GENERATED}])
    for position in (2, 0):
        await buffer.add_episode("open", episode(float(position)), position=position)
    await (await store.buffer("code")).put(groups(3, "code"))
    return await everything(store)


async def everything(store: Store) -> list[StoredGroup]:
    """Return all groups of all buffers, sorted by uid."""
    found: list[StoredGroup] = []
    for info in await store.buffers():
        buffer = await store.buffer(info.name)
        found += await buffer.get([one.id for one in await buffer.find()])
    return sorted(found, key=lambda one: one.group_uid)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("engine_name", "destination", "format"),
    [
        ("sqlite", "folder", "parquet"),
        ("postgresql", "folder", "jsonl"),
        ("sqlite", "bucket", "parquet"),
        pytest.param("postgresql", "folder", "parquet", marks=pytest.mark.nightly),
        pytest.param("sqlite", "folder", "jsonl", marks=pytest.mark.nightly),
        pytest.param("postgresql", "bucket", "parquet", marks=pytest.mark.nightly),
    ],
    indirect=["destination"],
)
async def test_a_store_is_exported_and_imported(
    store: Store, url: str, tmp_path: Path, destination: str, format: Any
) -> None:
    given = await fill(store)
    seen: list[tuple[int, int | None]] = []
    report = export_groups(
        url, destination, format=format, progress=lambda *counts: seen.append(counts)
    )
    assert (report.num_groups, report.num_episodes, report.num_left_out) == (14, 23, 0)
    assert report.num_files >= 5
    assert seen[-1] == (14, 14)
    fresh = f"sqlite:///{tmp_path / 'fresh.db'}"
    async with Store.open(fresh) as other:
        with pytest.raises(UnknownBufferError):
            import_groups(fresh, destination)
        counts = import_groups(fresh, destination, create=True)
        assert counts == ImportReport(report.num_files, 14, 23, 14)
        assert import_groups(fresh, destination).num_put == 0
        found = await everything(other)
        assert [content(one) for one in found] == [content(one) for one in given]
        for one, before in zip(found, given, strict=True):
            expected = "aborted" if before.status == "pending" else before.status
            assert one.status == expected
            for name in ("group_uid", "task_name", "prompt_uid", "priority", "tags", "texts",
                         "expected_episodes", "prompt"):  # fmt: skip
                assert getattr(one, name) == getattr(before, name), name
        assert {info.name for info in await other.buffers()} == {"math / 数学", "code"}
        assert "test" in {one.name for one in await other.runs()}
        assert {one.run_name for one in await (await other.buffer("code")).find()} == {"test"}


@postgresql_nightly
async def test_statuses_and_runs(store: Store, other: Store, url: str, tmp_path: Path) -> None:
    buffer = await store.buffer("math")
    await buffer.put([*groups(4), group("expired", status="expired")])
    await (await other.buffer("math")).put(group("theirs"))
    await buffer.update(uids="gsm8k-3", status="archived", reason="by hand")
    lease = await buffer.lease(1, rdb.Fifo(), ttl=60)
    export_groups(url, tmp_path / "export")
    fresh = f"sqlite:///{tmp_path / 'fresh.db'}"
    async with Store.open(fresh) as third, lease:
        import_groups(fresh, tmp_path / "export", buffer="all", create=True)
        found = {one.group_uid: one for one in await (await third.buffer("all")).find()}
        assert {uid: str(one.status) for uid, one in found.items()} == {
            "gsm8k-0": "completed", "gsm8k-1": "completed", "gsm8k-2": "completed",
            "gsm8k-3": "archived", "expired": "expired", "theirs": "completed",
        }  # fmt: skip
        assert found["gsm8k-3"].status_reason == "by hand"
        assert found["theirs"].run_name == "other"
        lineages = {one.name: one.lineage for one in await third.runs()}
        assert lineages["test"] == "test"


def check_files(folder: Path) -> None:
    """Check that every file except the manifest is complete."""
    for path in folder.rglob("*"):
        if path.is_file() and path.name != NAME:
            assert pq.read_table(path, partitioning=None).num_rows > 0


@postgresql_nightly
@pytest.mark.usefixtures("small")
async def test_an_interrupted_export_resumes(
    buffer: Buffer, url: str, tmp_path: Path, destination: str
) -> None:
    """Interrupted at every group: no incomplete file is visible, no group is written twice."""
    await buffer.put(groups(9))
    tries = 0
    done = None
    while done is None:
        tries += 1
        left = iter(range(2))

        def interrupt(*counts: Any, left: Iterator[int] = left) -> None:
            if next(left, None) is None:
                raise KeyboardInterrupt

        try:
            done = export_groups(url, destination, progress=interrupt)
        except KeyboardInterrupt:
            with pytest.raises(InvalidInputError, match="rerun the export"):
                import_groups(url, destination)
        if not destination.startswith("s3:"):
            check_files(Path(destination))
    assert tries > 2
    assert (done.num_groups, done.num_files) == (9, 5)
    await buffer.put(groups(1, "later"))
    later = export_groups(url, destination)
    assert (later.num_groups, later.num_files) == (10, 6)
    assert import_groups(url, destination, buffer=buffer.name).num_groups == 10


@postgresql_nightly
async def test_other_parquet_readers(buffer: Buffer, url: str, tmp_path: Path) -> None:
    await buffer.put([*groups(3), *groups(2, "code")])
    report = export_groups(url, tmp_path / "export")
    assert isinstance(report, ExportReport)
    assert report.num_bytes == sum(
        path.stat().st_size for path in (tmp_path / "export").rglob("*.parquet")
    )
    table = ds.dataset(tmp_path / "export", partitioning="hive").to_table()
    assert table.num_rows == 10
    assert set(table["task"].to_pylist()) == {"gsm8k", "code"}
    files = str(tmp_path / "export" / "**" / "*.parquet")
    assert len(pl.read_parquet(files, hive_partitioning=False)) == 10
    with duckdb.connect() as connection:
        found = connection.execute(
            "SELECT task, sum(len(token_ids)) FROM read_parquet(?, hive_partitioning = true)"
            " GROUP BY task ORDER BY task",
            [files],
        ).fetchall()
    assert found == [("code", 20), ("gsm8k", 30)]


@postgresql_nightly
async def test_one_file_of_an_export(buffer: Buffer, url: str, tmp_path: Path) -> None:
    await buffer.put([*groups(3), *groups(2, "code")])
    export_groups(url, tmp_path / "export")
    [file] = (tmp_path / "export").rglob("task=code/*.parquet")
    assert import_groups(url, file, buffer="one", create=True).num_groups == 2
    with pytest.raises(InvalidInputError, match="other files"):
        export_groups(url, file)


async def test_groups_without_tokens_are_counted(store: Store, url: str, tmp_path: Path) -> None:
    buffer = await store.buffer("math", archived_payload="drop", max_times_sampled=1)
    await buffer.put(groups(3))
    await buffer.sample(1)
    report = export_groups(url, tmp_path / "export")
    assert (report.num_groups, report.num_left_out) == (2, 1)


@postgresql_nightly
async def test_filters(store: Store, url: str, tmp_path: Path) -> None:
    await fill(store)
    where = rdb.col.reward_mean > 0.1
    report = export_groups(url, tmp_path / "export", buffer="code", tasks="code", where=where)
    assert report.num_groups == 3
    for others in (
        {"buffer": "code", "tasks": "code"},
        {"buffer": "code", "tasks": "code", "where": rdb.col.reward_mean > 0.2},
        {"buffer": "code", "tasks": "code", "where": where, "format": "jsonl"},
    ):
        with pytest.raises(InvalidInputError, match="other groups"):
            export_groups(url, tmp_path / "export", **others)
    again = export_groups(url, tmp_path / "export", buffer="code", tasks="code", where=where)
    assert again == report


@postgresql_nightly
async def test_invalid_arguments(buffer: Buffer, url: str, tmp_path: Path, s3: S3Server) -> None:
    await buffer.put(groups(1))
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "notes.txt").write_text("mine")
    with pytest.raises(InvalidInputError, match="other files"):
        export_groups(url, tmp_path / "others")
    with pytest.raises(InvalidInputError, match="files"):
        import_groups(url, tmp_path / "others")
    for destination in ("s3://", "ftp://host/x", "", 3):
        with pytest.raises((InvalidInputError, InvalidURLError), match="destination"):
            export_groups(url, destination)  # type: ignore[arg-type]
        with pytest.raises((InvalidInputError, InvalidURLError), match="source"):
            import_groups(url, destination)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="format"):
        export_groups(url, tmp_path / "x", format="csv")  # type: ignore[arg-type]
    with pytest.raises(UnknownBufferError):
        export_groups(url, tmp_path / "x", buffer="mth")
    with pytest.raises(PayloadsUnavailableError, match="NoSuchBucket"):
        export_groups(url, s3.url("x", bucket="nothing"))
    assert not (tmp_path / "x").exists()


@postgresql_nightly
async def test_an_import_puts_in_batches(
    buffer: Buffer, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await buffer.put(groups(5))
    export_groups(url, tmp_path / "export", format="jsonl")
    monkeypatch.setattr(importing, "PUT_GROUPS", 4)
    monkeypatch.setattr(importing, "PUT_TOKENS", 25)
    seen: list[Any] = []
    import_groups(url, tmp_path / "export", buffer="copy", create=True,
                  progress=lambda *counts: seen.append(counts))  # fmt: skip
    assert seen == [(2, 5), (4, 5), (5, 5)]


@postgresql_nightly
@pytest.mark.parametrize("format", ["parquet", "jsonl"])
async def test_only_generated_text_is_escaped(
    store: Store, url: str, tmp_path: Path, format: Any
) -> None:
    """Names and tags cannot have characters that need it: `␛0000` in them is not an escape."""
    mark, stored = "␛0000 ␛241b", "␛0000 ␛241b0000 ␛241b241b"
    text = f"\0 {mark}"
    one = rdb.Episode(
        prompt_ids=[1], response_ids=[2], finish_reason=mark, text=text, metadata={mark: text}
    )
    names: dict[str, Any] = {"task_name": f"t {mark}", "group_uid": mark, "prompt_uid": mark}
    buffer = await store.buffer(f"b {mark}")
    await buffer.put(EpisodeGroup(**names, episodes=[one], tags={mark: [mark]}, prompt=text))
    of_group, of_episode, of_tokens = (
        rows(url).to_table().to_pylist()[0]
        for rows in (analysis.groups, analysis.episodes, analysis.tokens)
    )
    assert of_group.items() >= names.items()
    assert of_tokens.items() >= names.items()
    assert json.loads(of_group["tags"]) == json.loads(of_tokens["tags"]) == {mark: [mark]}
    assert json.loads(of_tokens["prompt"]) == stored
    for row in of_episode, of_tokens:
        assert (row["task_name"], row["finish_reason"]) == (f"t {mark}", mark)
        assert (row["text"], json.loads(row["metadata"])) == (stored, {mark: stored})
    export_groups(url, tmp_path / "export", format=format)
    assert import_groups(url, tmp_path / "export", buffer="copy", create=True).num_put == 1
    [before], [after] = await buffer.get([1]), await (await store.buffer("copy")).get([2])
    for name in (*names, "tags", "texts", "prompt"):
        assert getattr(after, name) == getattr(before, name), name
    assert content(after) == content(before)


async def test_an_import_of_no_groups_needs_a_store(
    buffer: Buffer, url: str, empty_sqlite_url: str, tmp_path: Path
) -> None:
    export_groups(url, tmp_path / "export")
    with pytest.raises(DatabaseUnavailableError, match="there is no such file"):
        import_groups(empty_sqlite_url, tmp_path / "export", create=True)
    assert import_groups(url, tmp_path / "export").num_groups == 0


def test_the_commands(url: str, tmp_path: Path) -> None:
    async def filled() -> None:
        async with Store.open(url, run="test") as store:
            await fill(store)

    asyncio.run(filled())
    folder = tmp_path / "export"
    result = run("export", folder, "--buffer", "code", url=url)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("3 groups, 6 episodes in 1 files")
    result = run("import", folder, "--buffer", "copy", url=url)
    assert result.exit_code == 1
    assert "copy" in result.output
    result = run("import", folder, "--buffer", "copy", "--create", url=url)
    assert result.stdout.startswith("put 3 of 3 groups; read 6 episodes in 1 files")
    for named in ("--buffer", "--task", "--run"):
        result = run("export", tmp_path / "none", named, "cod", url=url)
        assert (result.exit_code, "cod" in result.stderr) == (1, True)
    assert not (tmp_path / "none").exists()
    wanted = ("--buffer", "code", "--where", "group_uid == 'code-0'")
    some = run("export", tmp_path / "some", *wanted, url=url)
    assert some.stdout.startswith("1 groups, 2 episodes in 1 files")
    lines = run("export", tmp_path / "lines", "--task", "code", "--status", "completed", "--run",
                "test", "--jsonl", "--skip-damaged", url=url)  # fmt: skip
    assert lines.exit_code == 0, lines.output
    [path] = (tmp_path / "lines" / "buffer=code" / "task=code").iterdir()
    assert json.loads(path.read_text(encoding="utf8").splitlines()[0])["group_uid"] == "code-0"


@pytest.mark.parametrize("format", ["parquet", "jsonl"])
@pytest.mark.parametrize("engine_name", ["sqlite"])
async def test_all_rows_of_a_group_are_in_one_file(
    store: Store, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: Any
) -> None:
    """Even if its rows are several batches, and the file has reached its size."""
    monkeypatch.setattr(decoded_groups, "BATCH_BYTES", 2000)
    monkeypatch.setattr(exporting, "PART_BYTES", 1)
    buffer = await store.buffer("math")
    await buffer.put(
        [group(f"{i}", rewards=[0.5] * 10, prompt="x" * 300, prompt_ids=[1, 2]) for i in range(3)]
    )
    given = await everything(store)
    report = export_groups(url, tmp_path / "export", format=format)
    assert (report.num_files, report.num_groups, report.num_episodes) == (3, 3, 30)
    fresh = f"sqlite:///{tmp_path / 'fresh.db'}"
    async with Store.open(fresh) as other:
        import_groups(fresh, tmp_path / "export", create=True)
        assert [content(one) for one in await everything(other)] == [content(one) for one in given]
