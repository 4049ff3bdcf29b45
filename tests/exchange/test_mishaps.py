"""Exports and imports with late groups, concurrent writers, and damaged or changed files."""

from __future__ import annotations

import json
import random
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import pyarrow.dataset as ds
import pytest

import replaydb as rdb
from replaydb import Buffer, Store, blocking
from replaydb.errors import InvalidInputError, PayloadsUnavailableError
from replaydb.exchange import export_groups, import_groups
from replaydb.exchange.files import Folder, files_at
from replaydb.exchange.manifest import NAME, Manifest, Part, packed
from support.engines import postgresql_nightly
from support.groups import episode, group, groups
from support.invariants import check_invariants


def uids(folder: Path) -> list[str]:
    """Return the uids of the groups in the files; check that each is there once."""
    table = ds.dataset(folder, format="parquet").to_table(columns=["group_id", "group_uid"])
    found = table.group_by(["group_id", "group_uid"]).aggregate([([], "count_all")])
    assert set(found["count_all"].to_pylist()) == {2}  # episodes of each
    return sorted(found["group_uid"].to_pylist())


@postgresql_nightly
@pytest.mark.usefixtures("small")
async def test_groups_that_match_later_are_exported_later(
    buffer: Buffer, url: str, tmp_path: Path
) -> None:
    """Its id is lower than ids that are in files, as when transactions overlap."""
    ids = await buffer.put(groups(7))
    async with await buffer.lease(3, rdb.Fifo(), ttl=60) as lease:
        report = export_groups(url, tmp_path / "export", statuses="completed")
        assert (report.num_groups, report.num_left_out) == (4, 0)
        await lease.nack()
    await buffer.update(ids[3:5], status="filtered")
    seen: list[Any] = []
    report = export_groups(
        url, tmp_path / "export", statuses="completed", progress=lambda *counts: seen.append(counts)
    )
    assert (report.num_groups, report.num_left_out) == (7, 0)
    assert seen[-1] == (7, 7)
    assert uids(tmp_path / "export") == [f"gsm8k-{i}" for i in range(7)]
    assert export_groups(url, tmp_path / "export", statuses="completed") == report


@postgresql_nightly
@pytest.mark.usefixtures("small")
async def test_of_two_exports_the_later_one_continues(
    buffer: Buffer, url: str, tmp_path: Path
) -> None:
    await buffer.put(groups(5))
    later: list[Any] = []

    def export_meanwhile(*counts: Any) -> None:
        if not later:
            later.append(export_groups(url, tmp_path / "export", buffer="math"))

    with pytest.raises(InvalidInputError, match="no other export"):
        export_groups(url, tmp_path / "export", buffer="math", progress=export_meanwhile)
    assert later[0].num_groups == 5
    assert len(uids(tmp_path / "export")) == 5
    assert import_groups(url, tmp_path / "export", buffer="copy", create=True).num_put == 5
    assert export_groups(url, tmp_path / "export", buffer="math") == later[0]


@postgresql_nightly
@pytest.mark.parametrize("when", ["written", "recorded"])
async def test_an_export_killed_at_its_first_file(
    buffer: Buffer, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    await buffer.put(groups(3))

    def kill(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if when == "recorded":
            patch.setattr(Manifest, "save", kill)
        with pytest.raises(KeyboardInterrupt):
            export_groups(url, tmp_path / "export", progress=kill)
    assert export_groups(url, tmp_path / "export").num_groups == 3
    assert len(uids(tmp_path / "export")) == 3


@postgresql_nightly
@pytest.mark.parametrize("format", ["parquet", "jsonl"])
async def test_files_that_were_changed(
    store: Store, buffer: Buffer, url: str, tmp_path: Path, format: Any
) -> None:
    """No group is put, and rerunning the export rewrites incomplete files."""
    await buffer.put([*groups(2, "a"), *groups(2, "b")])
    report = export_groups(url, tmp_path / "export", format=format)
    [path] = (tmp_path / "export").rglob(f"task=b/part-*.{format}")
    original = path.read_bytes()
    copy = await store.buffer("copy")
    cut = original[: original.rindex(b"\n", 0, -1) + 1] if format == "jsonl" else original[:-9]
    for content in (cut, original.replace(b"b", b"c", 1), None):
        path.unlink()
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(InvalidInputError, match=path.name):
            import_groups(url, tmp_path / "export", buffer="copy")
        if content is None:
            break
    assert await copy.count() == 0
    again = export_groups(url, tmp_path / "export", format=format)
    assert (again.num_files, again.num_groups) == (report.num_files, 4)
    assert import_groups(url, tmp_path / "export", buffer="copy").num_put == 4
    assert await copy.count() == 4


@pytest.mark.parametrize(
    "change",
    [
        lambda facts: facts["parts"][0].update(name="/etc/passwd"),
        lambda facts: facts["parts"][0].update(name=f"buffer=a/../../{facts['parts'][0]['name']}"),
        lambda facts: facts["parts"][0].update(name=5),
        lambda facts: facts["parts"][0].update(num_groups="5"),
        lambda facts: facts["parts"][0].update(ids=""),
        lambda facts: facts["parts"][0].pop("sha256"),
        lambda facts: facts["parts"].append(facts["parts"][0]),
        lambda facts: facts.update(parts={}),
        lambda facts: facts.update(wanted=None),
        lambda facts: facts["wanted"].pop("buffers"),
        lambda facts: facts.update(wanted=facts["wanted"], version=2),
    ],
)  # fmt: skip
def test_a_manifest_that_was_changed(tmp_path: Path, change: Any) -> None:
    part = Part("buffer=a/task=a/part-00000-1c9e5a04.jsonl", "a", "a", 1, 1, 1, "", packed([1]))
    files = files_at("source", tmp_path)
    Manifest({"buffers": {"a": ""}}, [part], complete=True).begin(files)
    facts = json.loads((tmp_path / NAME).read_bytes())
    assert Manifest.load(files) is not None
    change(facts)
    (tmp_path / NAME).write_text(json.dumps(facts))
    with pytest.raises(InvalidInputError, match=NAME):
        Manifest.load(files)


@pytest.mark.parametrize("content", [b"", b"[]", b"[" * 100_000, b"\xff", None])
def test_an_invalid_manifest(tmp_path: Path, content: bytes | None) -> None:
    if content is None:
        (tmp_path / NAME).mkdir()
    else:
        (tmp_path / NAME).write_bytes(content)
    kind = PayloadsUnavailableError if content is None else InvalidInputError
    with pytest.raises(kind, match=NAME if content is not None else tmp_path.name):
        Manifest.load(files_at("source", tmp_path))


@postgresql_nightly
@pytest.mark.parametrize("num_lost", [1, 2])
async def test_a_manifest_that_is_written_elsewhere(
    buffer: Buffer, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_lost: int
) -> None:
    """As by an endpoint that temporarily leads to another service."""
    await buffer.put(groups(2))
    put, left = Folder.put, iter([True] * (3 - num_lost))

    def put_somewhere(files: Folder, name: str, content: bytes) -> None:
        if next(left, False):
            put(files, name, content)

    monkeypatch.setattr(Folder, "put", put_somewhere)
    with pytest.raises(PayloadsUnavailableError, match=f"{NAME} cannot be read as it was written"):
        export_groups(url, tmp_path / "export")
    monkeypatch.undo()
    export_groups(url, tmp_path / "export")
    assert import_groups(url, tmp_path / "export", buffer="again", create=True).num_put == 2


@postgresql_nightly
async def test_a_manifest_without_one_of_the_files(
    buffer: Buffer, url: str, tmp_path: Path
) -> None:
    await buffer.put([*groups(2, "a"), *groups(2, "other")])
    export = tmp_path / "export"
    export_groups(url, export)
    facts = json.loads((export / NAME).read_bytes())
    del facts["parts"][1]
    (export / NAME).write_text(json.dumps(facts))
    with pytest.raises(InvalidInputError, match=rf"{NAME}.*task=other"):
        import_groups(url, export, buffer="again", create=True)
    export_groups(url, export)
    assert import_groups(url, export, buffer="again", create=True).num_put == 4


@pytest.fixture
def small_files_only() -> Iterator[None]:
    """Limit the size of files that this process writes to 100 kB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@postgresql_nightly
@pytest.mark.parametrize("format", ["parquet", "jsonl"])
async def test_a_full_destination(
    buffer: Buffer, url: str, tmp_path: Path, format: Any, request: pytest.FixtureRequest
) -> None:
    """As with a full disk: no incomplete file is visible."""
    text = random.Random(7).randbytes(200_000).hex()
    await buffer.put(rdb.EpisodeGroup("math", [episode(1.0, text=text)]))
    (tmp_path / "file").touch()
    with pytest.raises(PayloadsUnavailableError, match=r"file/below: "):
        export_groups(url, tmp_path / "file" / "below", format=format)
    request.getfixturevalue("small_files_only")
    with pytest.raises(PayloadsUnavailableError, match=r"export: .*[Tt]oo large"):
        export_groups(url, tmp_path / "export", format=format)
    assert [path.name for path in (tmp_path / "export").rglob("*") if path.is_file()] == [NAME]


async def test_archived_groups_take_no_capacity(
    store: Store, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = await store.buffer("math")
    await source.put(groups(4))
    await source.update(uids=["gsm8k-0", "gsm8k-1"], status="archived", reason="by hand")
    async with await source.lease(2, ttl=60):
        pass
    export_groups(url, tmp_path / "export")
    full = await store.buffer("full", capacity=rdb.Capacity(groups=2))
    await full.put(groups(2, "live"))

    def kill(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(blocking.Buffer, "update", kill)
        with pytest.raises(KeyboardInterrupt):
            import_groups(url, tmp_path / "export", buffer="full")
    assert await full.count(statuses="archived") == 4  # at once, never with another status
    import_groups(url, tmp_path / "export", buffer="full")
    found = {one.group_uid: one for one in await full.find()}
    assert {uid: (str(one.status), one.status_reason) for uid, one in found.items()} == {
        "gsm8k-0": ("archived", "by hand"), "gsm8k-1": ("archived", "by hand"),
        "gsm8k-2": ("archived", "acked"), "gsm8k-3": ("archived", "acked"),
        "live-0": ("completed", None), "live-1": ("completed", None),
    }  # fmt: skip
    assert all(one.num_tokens for one in await full.get([one.id for one in found.values()]))
    assert all((one.archived_at is None) == (uid[0] == "l") for uid, one in found.items())
    await check_invariants(url)


@postgresql_nightly
async def test_rows_in_another_order(
    store: Store, buffer: Buffer, url: str, tmp_path: Path
) -> None:
    """Groups are imported completely or not at all."""
    given = [group(str(i), rewards=(1.0, 2.0, 3.0), prompt_ids=[i]) for i in range(3)]
    await buffer.put(given)
    export_groups(url, tmp_path / "export")
    copy = await store.buffer("copy")

    def written(query: str) -> Path:
        path = tmp_path / "sorted.parquet"
        rows = f"read_parquet('{tmp_path}/export/**/*.parquet', hive_partitioning = false)"
        duckdb.sql(f"COPY ({query.format(rows)}) TO '{path}' (FORMAT parquet)")
        return path

    for query in (
        "FROM {} ORDER BY position, group_id",
        "FROM {} WHERE position = 1 ORDER BY group_id",
        "FROM {0} WHERE position < 2 UNION ALL FROM {0} WHERE position = 0 ORDER BY group_id",
        "SELECT * EXCLUDE (num_episodes, group_id) FROM {} ORDER BY position, group_uid",
    ):
        with pytest.raises(InvalidInputError, match=r"group '\d.*once|sort them by .* position"):
            import_groups(url, written(query), buffer="copy")
        assert await copy.count() == 0
    path = written("FROM {} ORDER BY group_id, position DESC")
    assert import_groups(url, path, buffer="copy").num_put == 3
    assert await copy.get([one.id for one in await copy.find()]) == given
    best = written("SELECT * EXCLUDE num_episodes FROM {} WHERE position = 2 ORDER BY group_id")
    import_groups(url, best, buffer="best", create=True)
    assert [one.num_episodes for one in await (await store.buffer("best")).find()] == [1] * 3

    halves = tmp_path / "halves"
    halves.mkdir()
    for i in range(2):
        path = written(f"SELECT * EXCLUDE num_episodes FROM {{}} WHERE position % 2 = {i}")  # noqa: S608
        path.rename(halves / f"{i}.parquet")
    with pytest.raises(InvalidInputError, match=r"in one file.*another file, too"):
        import_groups(url, halves, buffer="halves", create=True)
    assert "halves" not in [info.name for info in await store.buffers()]


@postgresql_nightly
@pytest.mark.parametrize("format", ["parquet", "jsonl"])
async def test_files_rewritten_by_other_tools(
    store: Store, buffer: Buffer, url: str, tmp_path: Path, format: Any
) -> None:
    """pandas converts integer columns with missing values to floats; editors add a BOM."""
    await buffer.put([group("a", version=3), group("b", version=None)])
    await buffer.open_group("gsm8k", "empty", 2)
    export_groups(url, tmp_path / "export", format=format)
    [path] = (tmp_path / "export").rglob(f"*.{format}")
    (again := tmp_path / "again").mkdir()
    if format == "parquet":
        frame = pd.read_parquet(path)
        assert frame.dtypes["position"] == frame.dtypes["policy_version"] == np.float64
        frame.to_parquet(again / path.name)
    else:
        lines = path.read_text(encoding="utf8").replace("\n", "\n\n")
        (again / path.name).write_text(f"\ufeff{lines}", encoding="utf8")
    assert import_groups(url, again, buffer="again", create=True).num_put == 3
    copy = await store.buffer("again")
    found = await copy.get(uids=["a", "b"])
    assert found == await buffer.get(uids=["a", "b"])
    assert [one.episodes[0].policy_version for one in found] == [3, None]


@postgresql_nightly
@pytest.mark.parametrize("most", [{"groups": 2}, {"tokens": 35}])
async def test_a_buffer_with_a_small_capacity(
    store: Store, buffer: Buffer, url: str, tmp_path: Path, most: dict[str, int]
) -> None:
    """Another process imports into it at the same time."""
    await buffer.put(groups(7))
    export_groups(url, tmp_path / "export")
    small = await store.buffer("small", capacity=rdb.Capacity(**most))
    find = blocking.Buffer.find

    def found(self: Any, *args: Any, **options: Any) -> Any:
        there = find(self, *args, **options)
        self.put(groups(1))
        return there

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocking.Buffer, "find", found)
        report = import_groups(url, tmp_path / "export", buffer="small")
    assert (report.num_groups, report.num_put) == (7, 6)
    kept = [one.group_uid for one in await small.find(statuses="completed")]
    assert kept == [f"gsm8k-{i}" for i in range(7 - len(kept), 7)]
    assert await small.count() == 7


@postgresql_nightly
async def test_a_run_with_another_lineage(buffer: Buffer, url: str, tmp_path: Path) -> None:
    await buffer.put(groups(1, "a"))
    export_groups(url, tmp_path / "export", format="jsonl")
    fresh = f"sqlite:///{tmp_path / 'fresh.db'}"
    async with Store.open(fresh, run="test", lineage="another") as other:
        copy = await other.buffer("copy")
        with pytest.raises(InvalidInputError, match=r"'test' with lineage 'another'.*'test'"):
            import_groups(fresh, tmp_path / "export", buffer="copy")
        [path] = (tmp_path / "export").rglob("*.jsonl")
        path.write_text(path.read_text(encoding="utf8").replace('"run_lineage"', '"other"'))
        with pytest.raises(InvalidInputError, match=r"'test' with lineage 'another'.*None"):
            import_groups(fresh, path, buffer="copy")
        assert await copy.count() == 0


@postgresql_nightly
@pytest.mark.parametrize("format", ["parquet", "jsonl"])
@pytest.mark.parametrize("how", ["within", "between"])
async def test_the_newest_group_of_a_uid_is_imported(
    buffer: Buffer, url: str, tmp_path: Path, format: Any, how: str
) -> None:
    """The group was renewed under a new id after the first export."""
    await buffer.put([group("a"), group("b"), group("c")])
    export_groups(url, tmp_path / "export", format=format)
    task = "gsm8k" if how == "within" else "another"
    new = rdb.EpisodeGroup(task, [episode(7.0)], group_uid="b")
    await buffer.put(new, on_duplicate="renew")
    assert export_groups(url, tmp_path / "export", format=format).num_groups == 4
    report = import_groups(url, tmp_path / "export", buffer="copy", create=True)
    assert (report.num_groups, report.num_put) == (4, 3)
    async with Store.open(url) as store:
        copy = await store.buffer("copy")
        [found] = await copy.get([(await copy.find(uids="b"))[0].id])
        assert (found.task_name, found.rewards.tolist()) == (task, [7.0])
        if how == "within":
            assert [one.group_uid for one in await copy.find()] == ["a", "c", "b"]
    assert import_groups(url, tmp_path / "export", buffer="copy").num_put == 0
