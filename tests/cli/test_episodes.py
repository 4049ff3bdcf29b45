"""`replaydb episodes`: tables and JSON."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
from sqlalchemy import update

import replaydb as rdb
from replaydb import Store
from replaydb.database.tables.schema import payload
from support.command import json_of, rows_of, run
from support.connections import transaction
from support.groups import conversation, episode

from .conftest import ESCAPED, HOSTILE


def test_filters_and_sort_order(filled_url: str) -> None:
    for options, rewards in {
        "--task even --ascending": [0, 1, 2, 3, 4, 5],
        "--min-reward 4.5": [5, 6, 5],
        "--min-reward 0 --max-reward 1": [1, 0, 1],
        "--limit 3": [5, 6, 4, 5],  # groups are listed whole
        "--run second --min-reward 6": [6],
        "--where tags['n']==2 --limit 1": [2, 3],
    }.items():
        listed = json_of("episodes", "list", "math", *options.split(), url=filled_url)
        assert [one["reward"] for one in listed] == rewards, options


def test_pages(filled_url: str) -> None:
    *table, more = rows_of(run("episodes", "list", "math", "--limit", 3, url=filled_url))
    assert table[0][:3] == ["group", "position", "reward"]
    assert [(row[1], row[2]) for row in table[1:]] == [
        ("0", "5"),
        ("1", "6"),
        ("0", "4"),
        ("1", "5"),
    ]
    rest = json_of("episodes", "list", "math", *more[2:], url=filled_url)
    assert [one["reward"] for one in rest] == [3, 4, 2, 3, 1, 2, 0, 1]


def test_texts_are_escaped(filled_url: str) -> None:
    shown = run("episodes", "show", "math", "uid-4", 1, url=filled_url)
    assert shown.stdout.endswith(f"text:\n  first line\n  {ESCAPED}\n")
    listed = run("episodes", "list", "math", url=filled_url)
    assert f"first line\\n{ESCAPED}" in listed.stdout
    for result in (shown, listed, run("groups", "show", "math", "uid-4", url=filled_url)):
        assert all(sign.isprintable() for sign in result.output.replace("\n", ""))
    facts = json_of("episodes", "show", "math", "uid-4", 1, url=filled_url)
    assert facts["text"] == f"first line\n{HOSTILE}"
    without_text = run("episodes", "show", "math", "uid-4", 0, url=filled_url)
    assert without_text.stdout.endswith("--tokenizer PATH decodes the tokens\n")


def test_tokens_are_listed(filled_url: str) -> None:
    columns = json_of("episodes", "show", "math", "uid-5", 0, "--tokens", url=filled_url)["tokens"]
    assert columns == {
        "position": [0, 1, 2, 3, 4],
        "id": [1, 2, 3, 4, 5],
        "mask": [0, 0, 1, 1, 1],
        "logprob": [0.0, 0.0, -0.5, -0.25, -1.0],
        "advantage": [None, None, 0.0, 0.0, 0.0],
        "version": [5, 5, 5, 5, 5],
        "turn": [0, 0, 0, 0, 0],
    }
    table = rows_of(run("episodes", "show", "math", "uid-5", 0, "--tokens", url=filled_url))
    assert ["3", "4", "1", "-0.25", "0", "5", "0"] in table


def test_turns_and_extras_are_columns(url: str) -> None:
    talk = conversation()
    scored = rdb.Episode(
        prompt_ids=[1],
        response_ids=[2, 3],
        logprobs=[float("nan"), -1.0],
        token_extras={
            "value": [0.5, 0.25],
            "hidden": [[1.0, 2.0], [3.0, 4.0]],
            "id": [1, 2],
            "\x1b[31m": [1, 2],
        },
        extras={"image": [[1, 2]]},
    )

    async def fill() -> None:
        async with rdb.Store.open(url) as store:
            buffer = await store.buffer("math")
            await buffer.put(rdb.EpisodeGroup("t", [talk, scored], group_uid="g"))

    asyncio.run(fill())
    turns = json_of("episodes", "show", "math", "g", 0, "--tokens", url=url)["tokens"]["turn"]
    lengths = [len(turn.prompt_ids) + len(turn.response_ids) for turn in talk.turns]
    assert turns == [0] * lengths[0] + [1] * lengths[1]
    columns = json_of("episodes", "show", "math", "g", 1, "--tokens", url=url)["tokens"]
    assert columns["logprob"] == [0.0, "NaN", -1.0]
    assert columns["id"] == [1, 2, 3]
    assert columns["extra.id"] == [0, 1, 2]
    assert columns["extra.value"] == [0.0, 0.5, 0.25]
    assert columns["extra.hidden"] == [[0.0, 0.0], [1.0, 2.0], [3.0, 4.0]]
    table = run("episodes", "show", "math", "g", 1, "--tokens", url=url).stdout
    assert "extra.\\x1b[31m" in table
    assert "[3.0, 4.0]" in table
    assert '"image": "int' in table
    facts = json_of("episodes", "show", "math", "g", 1, url=url)
    assert (facts["position"], facts["extras"], facts["turns"]) == (1, {"image": [[1, 2]]}, [])
    facts = json_of("episodes", "show", "math", "g", 0, url=url)
    assert facts["group_id"] == json_of("groups", "show", "math", "g", url=url)["group"]["id"]
    first, second = facts["turns"]
    assert (first["reward"], first["policy_version"]) == (0.25, 3)
    assert (first["finish_reason"], first["metadata"]) == ("tool_calls", {"tool": "python"})
    assert (second["token_rewards"], second["policy_version"]) == ([0.125, 0.375], [4, 5])
    lines = rows_of(run("episodes", "show", "math", "g", 0, url=url))
    assert ["0", "2", "1", "0.25", "tool_calls"] in [row[:5] for row in lines]
    outcome = run("episodes", "show", "math", "g", 2, url=url)
    assert outcome.exit_code == 1
    assert (
        "position: expected a position of the group with an episode (0, 1), got 2" in outcome.stderr
    )


def test_turns_by_parent(url: str) -> None:
    """Tokens that a turn has from its parent are listed and counted once."""
    experts = np.ones((40, 2000), np.uint8)
    turns = [rdb.Turn(prompt_ids=range(30), response_ids=range(10), token_extras={"x": experts})]
    for _ in range(14):
        turns.append(rdb.Turn(parent=turns[-1], new_ids=[7], response_ids=[8, 9]))
    shifted = rdb.Episode(
        prompt_ids=[1, 2], response_ids=[3], token_extras={"ref": np.array([0.5, 0.25])}
    )

    async def fill() -> None:
        async with rdb.Store.open(url) as store:
            buffer = await store.buffer("math")
            episodes = [rdb.Episode(turns=turns), shifted]
            await buffer.put(rdb.EpisodeGroup("t", episodes, group_uid="g"))

    asyncio.run(fill())
    facts = json_of("episodes", "show", "math", "g", 0, "--tokens", url=url)
    assert facts["num_tokens"] == len(facts["tokens"]["id"]) == 40 + 14 * 3
    assert [turn["parent"] for turn in facts["turns"]] == [None, *range(14)]
    assert facts["turns"][14]["num_prompt_tokens"] == 40 + 13 * 3 + 1
    assert facts["tokens"]["turn"][-4:] == [13, 14, 14, 14]
    facts = json_of("episodes", "show", "math", "g", 1, "--tokens", url=url)
    assert facts["tokens"]["extra.ref"] == [0.5, 0.25, None]
    table = rows_of(run("episodes", "show", "math", "g", 1, "--tokens", url=url))
    assert [row[-1] for row in table[-4:-1]] == ["0.5", "0.25", "-"]

    assert json_of("groups", "show", "math", "g", url=url)["repeated_bytes"] == {}

    async def damage_experts() -> None:
        async with transaction(url) as connection:
            of_experts = payload.c.field == "x"
            await connection.execute(update(payload).where(of_experts).values(checksum=0))
            await connection.commit()

    asyncio.run(damage_experts())  # lists, and tables without tokens, do not read them
    listed = json_of("episodes", "list", "math", url=url)
    assert [one["num_tokens"] for one in listed] == [82, 3]
    for words in (("episodes", "show", "math", "g", 0), ("groups", "show", "math", "g")):
        assert ["num_tokens", "82" if words[0] == "episodes" else "85"] in rows_of(
            run(*words, url=url)
        )
    assert "cannot be read" not in run("groups", "show", "math", "g", url=url).stdout
    assert json_of("groups", "show", "math", "g", url=url)["episodes"] is None


def test_errors_of_tokenizers(sqlite_url: str, tmp_path: Path) -> None:
    """Decoding is tested with the integrations, which install tokenizers."""
    nowhere = tmp_path / "nowhere"
    words = ("episodes", "show", "math", "g", 0, "--tokenizer")
    outcome = run(*words, nowhere, url=sqlite_url)
    assert outcome.exit_code == 1
    assert "tokenizer: expected an existing file or folder" in outcome.stderr
    (tmp_path / "tokenizer.json").write_text("{}")
    outcome = run(*words, tmp_path, url=sqlite_url)
    assert outcome.exit_code == 1
    assert "to decode tokens, tokenizers is needed: pip install tokenizers" in outcome.stderr


def test_episodes_keep_their_positions(filled_url: str) -> None:
    async def opened() -> None:
        async with Store.open(filled_url) as store:
            buffer = await store.buffer("math")
            await buffer.open_group("agents", "g", 4, min_episodes=2)
            for position in (1, 3):
                await buffer.add_episode("g", episode(float(position)), position=position)
            for position in (0, 2):
                await buffer.fail_episode("g", position, "timeout")

    asyncio.run(opened())
    listed = json_of("episodes", "list", "math", "--task", "agents", url=filled_url)
    shown = json_of("groups", "show", "math", "g", url=filled_url)["episodes"]
    for found in (listed, shown):
        assert [(one["position"], one["reward"]) for one in found] == [(1, 1.0), (3, 3.0)]
    rows = rows_of(run("groups", "show", "math", "g", url=filled_url))
    assert ["3", "3"] in [row[:2] for row in rows]
    assert json_of("episodes", "show", "math", "g", 3, url=filled_url)["reward"] == 3.0
    outcome = run("episodes", "show", "math", "g", 2, url=filled_url)
    assert outcome.exit_code == 1
    assert "expected a position of the group with an episode (1, 3), got 2" in outcome.stderr
