"""`replaydb import-dataset` on the command line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from integrations.datasets.words import tokenizer
from replaydb import blocking
from support.command import json_of, run
from support.engines import both_engines

TEXTS = [
    {"prompt": "2 + 2 =", "completion": "4", "reward": 1.0, "level": "easy"},
    {"prompt": "2 + 2 =", "completion": "5", "reward": 0.0, "level": "easy"},
    {"prompt": "2 + 3 =", "completion": "5", "level": "hard"},
]


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    file = tmp_path / "sums.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in TEXTS), encoding="utf8")
    return file


@pytest.fixture
def words(tmp_path: Path) -> Path:
    tokenizer().save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


def output_of(url: str, *arguments: object) -> str:
    """The output of a command that succeeds."""
    result = run("import-dataset", *arguments, url=url)
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(url: str, *arguments: object) -> str:
    """The error of a command that is refused; adds `--name` if it is missing."""
    named = () if "--name" in arguments else ("--name", "arith")
    result = run("import-dataset", *arguments, *named, url=url)
    assert (result.exit_code, result.stdout) == (1, "")
    return result.stderr


def test_texts_of_json_lines(url: str, lines: Path, words: Path) -> None:
    arguments = (lines, "sums", "--name", "arith", "--tokenizer", words, "--tag", "level")
    assert output_of(url, *arguments, "--create") == "put 2 groups\n"
    assert output_of(url, *arguments) == "put 0 groups; skipped 3 rows of arith put before\n"
    first, second = json_of("groups", "list", "sums", "--ascending", "--sort", "id", url=url)
    assert (first["group_uid"], first["task_name"], first["num_episodes"]) == (
        "arith/0",
        "arith",
        2,
    )
    assert (second["group_uid"], second["tags"]) == ("arith/2", {"level": "hard"})
    with lines.open("a", encoding="utf8") as file:
        file.write("\n" + json.dumps(TEXTS[0]) + "\n")
    assert output_of(url, *arguments).startswith("put 1 groups; skipped 3 rows")


@both_engines
def test_tokens_of_a_folder_of_parquet(url: str, tmp_path: Path) -> None:
    folder = tmp_path / "made"
    folder.mkdir()
    for part in range(2):
        rows = [{"prompt_ids": [part], "completion_ids": [[1], [2, 3]], "rewards": [0.0, 1.0]}]
        pq.write_table(pa.Table.from_pylist(rows), folder / f"part-{part}.parquet")
    how = ("--name", "elsewhere", "--task", "math", "--create")
    assert output_of(url, folder, "sums", *how) == "put 2 groups\n"
    with blocking.Store.open(url) as store:
        groups = store.buffer("sums").get(uids=["elsewhere/0", "elsewhere/1"])
    assert [one.task_name for one in groups] == ["math", "math"]
    assert [one.episodes[1].token_ids.tolist() for one in groups] == [[0, 2, 3], [1, 2, 3]]


def test_refused_commands(url: str, lines: Path, words: Path, tmp_path: Path) -> None:
    output_of(url, lines, "sums", "--name", "arith", "--tokenizer", words, "--create")
    text = (lines, "sums", "--name", "again")
    assert "tokenizer: expected a tokenizer, because row 0" in refused(url, *text)
    assert "tokenizer: expected a Hugging Face tokenizer" in refused(
        url, *text, "--tokenizer", tmp_path
    )
    assert "there are: 'sums'" in refused(url, lines, "sum", "--tokenizer", words)
    assert "an existing file or folder" in refused(url, tmp_path / "none.jsonl", "sums")
    assert "an existing file or folder" in refused(url, words, "new", "--create")
    assert [one["name"] for one in json_of("buffers", "list", url=url)] == ["sums"]
    for content, what in (('{"prompt": "2"}\n{', "bad.jsonl, line 2"), ("3", "a JSON object")):
        (tmp_path / "bad.jsonl").write_text(content, encoding="utf8")
        assert what in refused(url, tmp_path / "bad.jsonl", "sums", "--tokenizer", words)
    for damage in (b"no", b"PAR1" + b"\xff" * 8 + b"\x08\0\0\0PAR1"):
        (tmp_path / "bad.parquet").write_bytes(damage)
        assert "a Parquet file" in refused(url, tmp_path / "bad.parquet", "sums")
    (tmp_path / "bad.jsonl").write_bytes(b"\xff")
    assert "lines of JSON" in refused(url, tmp_path / "bad.jsonl", "sums")
    assert len(json_of("groups", "list", "sums", url=url)) == 2


def test_a_missing_store_is_not_created(lines: Path, tmp_path: Path) -> None:
    assert "nowhere.db" in refused(f"sqlite:///{tmp_path}/nowhere.db", lines, "sums", "--create")
    assert not (tmp_path / "nowhere.db").exists()


def test_without_the_packages(url: str, lines: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "replaydb.integrations.datasets", raising=False)
    monkeypatch.setitem(sys.modules, "datasets", None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, "replaydb.integrations.datasets.incoming", raising=False)
    assert "pip install datasets" in refused(url, lines, "sums", "--create")
