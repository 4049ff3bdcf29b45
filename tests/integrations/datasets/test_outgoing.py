"""Export of stored groups as training sets in TRL's formats."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, IterableDataset
from torch.utils.data import DataLoader
from trl import is_conversational

import replaydb as rdb
from integrations.datasets.words import ids, tokenizer
from replaydb import blocking
from replaydb.integrations.datasets import (
    dpo_dataset,
    grpo_dataset,
    outgoing,
    put_dataset,
    sft_dataset,
)
from support.engines import both_engines, postgresql_nightly

USER = [{"role": "user", "content": "2 + 2 ="}]


@pytest.fixture
def sums(url: str) -> Iterator[blocking.Buffer]:
    with blocking.Store.open(url, run="test") as store:
        yield store.buffer("sums")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    return str(tmp_path / "cache")


def group(
    uid: str,
    rewards: Sequence[float | None] = (1.0, 0.0),
    *,
    task: str = "sums",
    prompt: Any = "2 + 2 =",
    texts: bool = True,
    **fields: Any,
) -> rdb.EpisodeGroup:
    """Episode i answers "4", "5" or "6" and has the text "answer i"."""
    episodes = [
        rdb.Episode(
            prompt_ids=ids("2 + 2 ="),
            response_ids=[*ids(("4", "5", "6")[i]), 1],
            logprobs=[-0.5, -0.25],
            reward=reward,
            text=f"answer {i}" if texts else None,
        )
        for i, reward in enumerate(rewards)
    ]
    return rdb.EpisodeGroup(task, episodes, group_uid=uid, prompt=prompt, **fields)


@pytest.fixture(params=[False, True], ids=["dataset", "iterable"])
def how(request: pytest.FixtureRequest, cache: str) -> dict[str, Any]:
    """Options of a set: an Arrow file, or streamed."""
    return {"streaming": request.param, "cache_dir": cache}


def test_the_best_of_each_group(url: str, sums: blocking.Buffer, how: dict[str, Any]) -> None:
    sums.put([group("a", [0.0, 1.0, 0.5]), group("b", [None, 0.25]), group("c", [None, None])])
    dataset = sft_dataset(url, "sums", **how)
    assert isinstance(dataset, IterableDataset if how["streaming"] else Dataset)
    assert list(dataset) == [
        {"prompt": "2 + 2 =", "completion": "answer 1", "reward": 1.0},
        {"prompt": "2 + 2 =", "completion": "answer 1", "reward": 0.25},
    ]
    assert len(list(sft_dataset(url, "sums", min_reward=0.5, **how))) == 1


def test_chats_stay_chats(url: str, sums: blocking.Buffer, how: dict[str, Any]) -> None:
    sums.put(group("a", prompt=USER))
    (row,) = sft_dataset(url, "sums", **how)
    assert row["prompt"] == USER
    assert row["completion"] == [{"role": "assistant", "content": "answer 0"}]
    (pair,) = dpo_dataset(url, "sums", **how)
    assert pair["rejected"] == [{"role": "assistant", "content": "answer 1"}]
    assert is_conversational(pair)
    assert is_conversational(row)


def conversation(**arguments: Any) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "add", "content": "4"},
        {"role": "assistant", "content": "It is 4."},
    ]


def chat(uid: str, *completions: Any) -> rdb.EpisodeGroup:
    """A group whose episodes have these completions in their metadata."""
    episodes = [
        rdb.Episode(
            prompt_ids=[4],
            response_ids=[8],
            reward=float(-i),
            text="transcript",
            metadata={
                "completion_json": json.dumps(one) if isinstance(one, list) else one,
            },
        )
        for i, one in enumerate(completions)
    ]
    return rdb.EpisodeGroup("sums", episodes, group_uid=uid, prompt=USER)


def test_conversations_stay_as_they_were(
    url: str, sums: blocking.Buffer, how: dict[str, Any]
) -> None:
    short, long = conversation(a=2, b=0.1 + 0.2), [*conversation(a="2"), *conversation(c=None)]
    sums.put([group("a", prompt=USER), chat("b", long, short)])
    assert [row["completion"] for row in sft_dataset(url, "sums", **how)] == [
        [{"role": "assistant", "content": "answer 0"}],
        long,
    ]
    pair = list(dpo_dataset(url, "sums", **how))[1]
    assert (pair["chosen"], pair["rejected"]) == (long, short)
    assert is_conversational(pair)


def test_messages_that_a_file_would_change_need_streaming(
    url: str, sums: blocking.Buffer, cache: str
) -> None:
    for uid, value in {"large": 2**64, "infinite": math.inf, "surrogate": "\ud800"}.items():
        messages = conversation(a=value)
        sums.put(chat(uid, messages))
        only = rdb.col.group_uid == uid
        (row,) = sft_dataset(url, "sums", streaming=True, where=only)
        assert row["completion"] == messages
        with pytest.raises(rdb.InvalidInputError, match=f"completion of group '{uid}'.*streaming"):
            sft_dataset(url, "sums", cache_dir=cache, where=only)


def test_metadata_that_is_no_conversation_is_refused(url: str, sums: blocking.Buffer) -> None:
    for i, stored in enumerate(["{", "4", '["4"]', 4]):
        sums.put(chat(f"g{i}", stored))
        where = rf"metadata\['completion_json'\] of episode 0 of group 'g{i}'"
        with pytest.raises(rdb.InvalidInputError, match=where):
            sft_dataset(url, "sums", streaming=True, where=rdb.col.group_uid == f"g{i}")


def test_sampled_tokens_are_returned(url: str, sums: blocking.Buffer, how: dict[str, Any]) -> None:
    turns = [
        rdb.Turn(prompt_ids=[1, 2], response_ids=[3]),
        rdb.Turn(prompt_ids=[1, 2, 3, 4], response_ids=[5]),
        rdb.Turn(prompt_ids=[9], response_ids=[8]),
    ]
    trajectory = rdb.EpisodeGroup("sums", [rdb.Episode(turns=turns, reward=1.0)])
    sums.put([group("a", [0.0, 1.0], texts=False, prompt=None), trajectory])
    assert list(sft_dataset(url, "sums", tokens=True, **how)) == [
        {
            "input_ids": [*ids("2 + 2 = 5"), 1],
            "completion_mask": [0, 0, 0, 0, 1, 1],
            "reward": 1.0,
        },
        {"input_ids": [1, 2, 3, 4, 5], "completion_mask": [0, 0, 1, 0, 1], "reward": 1.0},
        {"input_ids": [9, 8], "completion_mask": [0, 1], "reward": 1.0},
    ]


def test_missing_texts_are_decoded(url: str, sums: blocking.Buffer, cache: str) -> None:
    sums.put(group("a", texts=False, prompt=None))
    (row,) = dpo_dataset(url, "sums", tokenizer=tokenizer(), cache_dir=cache)
    assert row == {"prompt": "2 + 2 =", "chosen": "4", "rejected": "5", "margin": 1.0}


def test_pairs_of_best_and_worst(url: str, sums: blocking.Buffer, how: dict[str, Any]) -> None:
    sums.put(
        [
            group("tie", [0.5, 0.5]),
            group("alone", [1.0, None]),
            group("close", [0.5, 0.75, 0.5]),
            group("far", [0.0, None, 1.0]),
        ]
    )
    close, far = dpo_dataset(url, "sums", **how)
    assert (close["chosen"], close["rejected"], close["margin"]) == ("answer 1", "answer 0", 0.25)
    assert (far["chosen"], far["rejected"], far["margin"]) == ("answer 2", "answer 0", 1.0)
    assert list(dpo_dataset(url, "sums", min_margin=0.25, **how)) == [far]


@both_engines
def test_prompts_by_difficulty(url: str, sums: blocking.Buffer, how: dict[str, Any]) -> None:
    sums.put(
        [
            group("was hard", [0.0, 0.0], prompt_uid="p"),
            group("never", [0.0, 0.5], prompt_uid="q", tags={"answer": "4"}),
            group("half", [1.0, 0.0], prompt_uid="r", tags={"answer": "5"}),
            group("other task", [1.0, 0.0], prompt_uid="p", task="other"),
            group("now solved", [1.0, 1.0], prompt_uid="p"),
            group("nameless", [1.0, None, 0.0]),
            group("nameless too", [1.0, 0.0]),
        ]
    )

    def rates(**bounds: Any) -> list[tuple[str | None, float]]:
        rows = grpo_dataset(url, "sums", **bounds, **how)
        return [(row["prompt_uid"], row["solve_rate"]) for row in rows]

    everything = [(None, 0.5), (None, 0.5), ("p", 1.0), ("p", 0.5), ("r", 0.5), ("q", 0.0)]
    assert rates() == everything
    assert rates(solve_rate=(0.1, 0.9)) == [one for one in everything if one[1] == 0.5]
    assert ("q", 0.5) in rates(solved=0.5)
    rows = list(grpo_dataset(url, "sums", solve_rate=(0.0, 0.5), tags=["answer"], **how))
    assert [row["answer"] for row in rows] == [None, None, None, "5", "4"]


def test_filtered_groups_count_for_the_solve_rate(
    url: str, sums: blocking.Buffer, how: dict[str, Any]
) -> None:
    """A trainer that replaces zero-variance groups stores them as filtered."""
    sums.put([group("was half", prompt_uid="p"), group("half", prompt_uid="q")])
    sums.put(group("now solved", [1.0, 1.0], prompt_uid="p", status="filtered"))

    def rates(**selection: Any) -> list[tuple[str, float]]:
        rows = grpo_dataset(url, "sums", **selection, **how)
        return [(row["prompt_uid"], row["solve_rate"]) for row in rows]

    assert rates() == [("p", 1.0), ("q", 0.5)]
    assert rates(solve_rate=(0.2, 0.8)) == [("q", 0.5)]
    assert rates(statuses="completed") == [("q", 0.5), ("p", 0.5)]


@postgresql_nightly
def test_group_selection(url: str, sums: blocking.Buffer, cache: str) -> None:
    with blocking.Store.open(url, run="other") as store:
        store.buffer("sums").put(group("run"))
    sums.put(
        [
            group("task", task="other"),
            group("tag", tags={"level": "hard"}),
            group("failed", status="failed"),
            group("plain"),
        ]
    )

    def uids(**selection: Any) -> list[str]:
        dataset = sft_dataset(url, "sums", tags=["uid"], cache_dir=cache, **selection)
        return [row["uid"] for row in dataset]

    for one in sums.find():
        sums.update([one.id], tags={"uid": one.group_uid})
    assert uids() == ["run", "task", "tag", "plain"]
    assert uids(runs="other") == ["run"]
    assert uids(tasks=["other"]) == ["task"]
    assert uids(statuses="failed") == ["failed"]
    assert uids(where=rdb.col.tags["level"] == "hard") == ["tag"]
    with sums.lease(1, where=rdb.col.tags["level"] == "hard", ttl=60):
        assert uids() == ["run", "task", "tag", "plain"]
    assert sums.count(statuses="archived") == 1  # it was trained on, and has its episodes
    assert uids() == ["run", "task", "tag", "plain"]


def test_an_iteration_ends_at_the_newest_group_of_its_start(
    url: str, sums: blocking.Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outgoing, "PAGE", 2)
    found = sums.put([group(f"g{i}", [float(i), -1.0]) for i in range(7)])
    rows = iter(sft_dataset(url, "sums", streaming=True))
    assert next(rows)["reward"] == 0.0
    sums.put(group("late"))  # included in the next iteration only
    sums.delete([found[5]])
    sums.update([found[4]], status="archived")
    assert [row["reward"] for row in rows] == [1.0, 2.0, 3.0, 4.0, 6.0]


def test_groups_deleted_between_two_reads_are_skipped(
    url: str, sums: blocking.Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = sums.put([group(f"g{i}", [float(i), -1.0]) for i in range(4)])
    rows = sft_dataset(url, "sums", streaming=True)
    find = blocking.Buffer.find

    def find_and_lose(buffer: blocking.Buffer, **which: Any) -> list[rdb.GroupInfo]:
        infos = find(buffer, **which)
        if which.get("limit") == outgoing.PAGE:
            sums.delete([found[1]])
        return infos

    monkeypatch.setattr(blocking.Buffer, "find", find_and_lose)
    assert [row["reward"] for row in rows] == [0.0, 2.0, 3.0]


def test_cached_files_are_not_reused(url: str, sums: blocking.Buffer, cache: str) -> None:
    sums.put(group("a"))
    assert len(sft_dataset(url, "sums", cache_dir=cache)) == 1
    sums.put(group("b"))
    assert len(sft_dataset(url, "sums", cache_dir=cache)) == 2


@postgresql_nightly
def test_workers_open_the_store_themselves(url: str, sums: blocking.Buffer) -> None:
    sums.put([group(f"g{i}") for i in range(5)])
    dataset = sft_dataset(url, "sums", streaming=True).with_format("torch")
    loader = DataLoader(dataset, batch_size=2, num_workers=1, multiprocessing_context="spawn")
    assert [len(batch["prompt"]) for batch in loader] == [2, 2, 1]


def test_refused_calls(url: str, sums: blocking.Buffer, how: dict[str, Any]) -> None:
    with pytest.raises(rdb.InvalidInputError, match="at least one selected group"):
        sft_dataset(url, "sums", **how)
    with pytest.raises(rdb.UnknownBufferError):
        sft_dataset(url, "prods", **how)
    with pytest.raises(rdb.InvalidInputError, match="0 <= lowest <= highest <= 1"):
        grpo_dataset(url, "sums", solve_rate=(0.5, 0.25), **how)
    sums.put(group("a"))
    sums.put(group("b", texts=False))
    with pytest.raises(rdb.InvalidInputError, match="text of episode 0 of group 'b'"):
        list(sft_dataset(url, "sums", **how))
    sums.update(uids="b", status="filtered")
    sums.put(group("c", prompt=USER))
    with pytest.raises(rdb.InvalidInputError, match=r"prompt of group 'c'.*messages"):
        list(sft_dataset(url, "sums", **how))
    sums.update(uids=["a", "c"], status="filtered")
    sums.put(group("d", prompt=None))
    with pytest.raises(rdb.InvalidInputError, match="prompt of group 'd'"):
        dpo_dataset(url, "sums", **how)


def test_tags_of_several_types_or_the_names_of_columns_are_refused(
    url: str, sums: blocking.Buffer, how: dict[str, Any]
) -> None:
    sums.put([group("a", tags={"n": 1}), group("b", tags={"n": 1.5}), group("c")])
    assert [row["n"] for row in sft_dataset(url, "sums", tags=["n"], **how)] == [1.0, 1.5, None]
    with pytest.raises(rdb.InvalidInputError, match=r"tags: .*'reward'"):
        sft_dataset(url, "sums", tags=["n", "reward"], **how)
    sums.put(group("d", tags={"n": "42"}))
    with pytest.raises(rdb.InvalidInputError, match=r"n of group 'd': expected float.*got str"):
        list(sft_dataset(url, "sums", tags=["n"], **how))


def test_late_types_need_streaming(
    url: str, sums: blocking.Buffer, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.DEFAULT_MAX_BATCH_SIZE", 2)  # for 1,000
    sums.put([group("a"), group("b"), group("c"), group("d", tags={"answer": "4"})])
    with pytest.raises(rdb.InvalidInputError, match="streaming=True"):
        sft_dataset(url, "sums", tags=["answer"], cache_dir=cache)
    rows = sft_dataset(url, "sums", tags=["answer"], streaming=True)
    assert [row["answer"] for row in rows] == [None, None, None, "4"]


def test_import_and_export_round_trip(url: str, sums: blocking.Buffer, cache: str) -> None:
    rows = [{"prompt": USER, "completions": ["4", "5"], "rewards": [1.0, 0.0]}]
    put_dataset(sums, Dataset.from_list(rows), "d", tokenizer=tokenizer())
    (pair,) = dpo_dataset(url, "sums", cache_dir=cache)
    assert pair["prompt"] == USER
    assert [pair[name][0]["content"] for name in ("chosen", "rejected")] == ["4", "5"]
