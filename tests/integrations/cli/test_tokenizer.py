"""`replaydb episodes show --tokenizer`, with tokenizers and transformers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from typer.testing import CliRunner

import replaydb as rdb
from replaydb.cli import app


def _run(*words: str) -> tuple[int, str]:
    outcome = CliRunner().invoke(app, ["episodes", "show", "math", "g", "0", *words])
    return outcome.exit_code, outcome.output


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A store with one episode, in the environment."""
    address = f"sqlite:///{tmp_path / 'replay.db'}"

    async def fill() -> None:
        async with rdb.Store.open(address) as store:
            episode = rdb.Episode(prompt_ids=[0, 1], response_ids=[2, 1])
            await (await store.buffer("math")).put(rdb.EpisodeGroup("t", [episode], group_uid="g"))

    asyncio.run(fill())
    monkeypatch.setenv("REPLAYDB_URL", address)
    return address


@pytest.mark.parametrize("named", ["file", "folder"])
def test_tokens_are_decoded(url: str, tmp_path: Path, named: str) -> None:
    vocabulary = {"what": 0, "\x1b[2J": 1, "that": 2}
    file = tmp_path / "tokenizer.json"
    Tokenizer(models.WordLevel(vocabulary, "what")).save(str(file))
    path = str(file if named == "file" else tmp_path)
    code, output = _run("--tokenizer", path, "--tokens")
    assert code == 0, output
    assert output.endswith("prompt:\n  what \\x1b[2J\nresponse:\n  that \\x1b[2J\n")
    code, output = _run("--tokenizer", path, "--tokens", "--json")
    shown = json.loads(output)
    assert (shown["prompt"], shown["response"]) == ("what \x1b[2J", "that \x1b[2J")
    assert shown["tokens"]["text"] == ["what", "\x1b[2J", "that", "\x1b[2J"]


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json"])
def test_what_is_no_tokenizer_is_refused(url: str, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / name).write_text("{}")
    code, output = _run("--tokenizer", str(folder))
    assert code == 1
    assert "tokenizer: expected a Hugging Face tokenizer" in output
