"""Folders of an export are distinct and valid on every file system, whatever the names."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from urllib.parse import unquote

import duckdb
import pytest

from replaydb import Buffer, Store
from replaydb.exchange import export_groups, exporting, import_groups
from replaydb.exchange.manifest import NAME
from support.groups import group, groups

DIGEST = hashlib.sha256(b"math").hexdigest()[:16]
ORDINARY = ["gsm8k", "AIME_2024", "math-500", "a b", "v1.5"]
NAMES = [
    *ORDINARY,
    *("Math", "math", "MATH", f"math,{DIGEST}", f"Math,{DIGEST}"),
    *("a", "a.", "a ", "a%20", "a..", ".a", ".", "..", " "),
    *("CON", "aux.txt", "nul", "a:b", "a\\b", "a/b", 'a"b', "a|b?*<>", "a\n", "a=b", "~"),
    *("\N{LATIN SMALL LETTER E WITH ACUTE}", "e\N{COMBINING ACUTE ACCENT}"),
    *("数" * 250, "数" * 251, "x" * 200, "X" * 200, "x" * 128),
]


def folders(export: Path, pattern: str) -> list[str]:
    return sorted(path.name for path in export.glob(pattern) if path.is_dir())


def check(found: list[str], count: int) -> None:
    """Check that the names are distinct, and valid in Windows, where case does not count."""
    assert len({name.lower() for name in found}) == count
    for name in found:
        assert len(name.encode()) <= 160
        assert name.isascii()
        assert not name.endswith((" ", "."))
        assert not set('<>:"/\\|?*') & set(name)
        assert name.isprintable()


@pytest.mark.parametrize("engine_name", ["sqlite"])
async def test_tasks_of_any_name(buffer: Buffer, url: str, tmp_path: Path) -> None:
    await buffer.put([group(f"{i}", task) for i, task in enumerate(NAMES)])
    export = tmp_path / "export"
    report = export_groups(url, export)
    assert report.num_files == len(NAMES)
    found = folders(export, "buffer=math/task=*")
    check(found, len(NAMES))
    assert {f"task={name}" for name in ORDINARY} <= set(found)
    short = [name for name in found if "," not in name]
    assert {unquote(name).removeprefix("task=") for name in short} < set(NAMES)
    assert len(found) - len(short) == 7  # four are too long, and three differ only in case
    assert import_groups(url, export, buffer="copy", create=True).num_put == len(NAMES)
    # Readers of Hive partitions get the original names.
    table = duckdb.read_parquet(f"{export}/**/*.parquet", hive_partitioning=True)
    rows = table.select("task", "task_name").fetchall()
    assert len(rows) == 2 * len(NAMES)
    assert all(task == name for task, name in rows if name in ORDINARY)


@pytest.mark.parametrize("engine_name", ["sqlite"])
async def test_buffers_that_differ_in_case(store: Store, url: str, tmp_path: Path) -> None:
    for name in ("Math", "math", "MATH"):
        await (await store.buffer(name)).put(groups(2, "GSM8K"))
    export = tmp_path / "export"
    export_groups(url, export, format="jsonl")
    check(folders(export, "*"), 3)
    await (await store.buffer("math")).put(groups(1, "gsm8k"))
    report = export_groups(url, export, format="jsonl")
    assert (report.num_files, report.num_groups) == (4, 7)
    check(folders(export, "*"), 3)
    check(folders(export, "*/*"), 2)
    async with Store.open(f"sqlite:///{tmp_path / 'fresh.db'}"):
        fresh = f"sqlite:///{tmp_path / 'fresh.db'}"
        assert import_groups(fresh, export, create=True).num_put == 7


@pytest.mark.parametrize("engine_name", ["sqlite"])
async def test_an_export_of_an_earlier_version_is_resumed(
    buffer: Buffer, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps its files, and a task its folder, unless another task has the same in Windows."""
    monkeypatch.setattr(exporting, "PART_BYTES", 1)
    long = "x" * 200
    await buffer.put([group("1", "Math"), group("2", "math"), group("3", long), group("4", "a.")])
    export = tmp_path / "export"
    export_groups(url, export)
    manifest = json.loads((export / NAME).read_text())
    earlier = {"Math": "Math", "math": "math", "a.": "a.", long: f"{'x' * 96}-{DIGEST}"}
    for part in manifest["parts"]:
        old = export / part["name"]
        part["name"] = f"buffer=math/task={earlier[part['task']]}/{old.name}"
        (export / part["name"]).parent.mkdir(exist_ok=True)
        old.rename(export / part["name"])
    manifest["complete"] = False
    (export / NAME).write_text(json.dumps(manifest))
    names = {part["name"] for part in manifest["parts"]}
    await buffer.put([group("5", "Math"), group("6", "math"), group("7", long), group("8", "a.")])
    assert export_groups(url, export).num_files == 8
    parts = json.loads((export / NAME).read_text())["parts"]
    new = {part["task"]: part["name"].split("/")[1] for part in parts if part["name"] not in names}
    assert names < {part["name"] for part in parts}
    assert new["a."] == "task=a."
    assert new[long] == f"task={'x' * 96}-{DIGEST}"
    assert new["Math"].lower() != new["math"].lower()
    assert import_groups(url, export, buffer="copy", create=True).num_put == 8
