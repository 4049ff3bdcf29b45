"""Import of datasets: each row is stored once."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from datasets import Dataset, IterableDataset

import replaydb as rdb
from integrations.datasets.words import ids, tokenizer
from replaydb import blocking
from replaydb.integrations.datasets import incoming, put_dataset, sft_dataset
from support.engines import postgresql_nightly
from support.groups import GENERATED

USER = [{"role": "user", "content": "2 + 2 ="}]


@pytest.fixture
def sums(url: str) -> Iterator[blocking.Buffer]:
    with blocking.Store.open(url, run="test") as store:
        yield store.buffer("sums")


def stored(buffer: blocking.Buffer) -> list[rdb.StoredGroup]:
    return buffer.get([one.id for one in buffer.find()])


def test_rows_of_one_prompt_are_a_group(sums: blocking.Buffer) -> None:
    dataset = Dataset.from_dict(
        {
            "prompt": ["2 + 2 =", "2 + 2 =", "2 + 3 =", "2 + 2 ="],
            "completion": ["4", "5", "5", "4"],
            "reward": [1.0, 0.0, None, 1.0],
            "level": ["easy", "easy", "hard", "easy"],
        }
    )
    assert put_dataset(sums, dataset, "arith", tokenizer=tokenizer(), tags=["level"]) == 3
    first, second, third = stored(sums)
    assert [one.group_uid for one in (first, second, third)] == ["arith/0", "arith/2", "arith/3"]
    assert (first.task_name, first.prompt, first.tags) == ("arith", "2 + 2 =", {"level": "easy"})
    assert (first.rewards.tolist(), first.texts) == ([1.0, 0.0], ["4", "5"])
    right = first.episodes[0]
    assert right.prompt_ids.tolist() == ids("2 + 2 =")
    assert right.response_ids.tolist() == ids("4 <eos>")
    assert (right.logprobs, right.policy_version) == (None, None)
    assert second.episodes[0].reward is None
    assert sums.cursor("dataset/arith") == 4


def test_rows_with_all_completions_of_a_prompt(sums: blocking.Buffer) -> None:
    answers = [[{"role": "assistant", "content": one}] for one in ("4", "5")]
    dataset = Dataset.from_list(
        [
            {"prompt": USER, "completions": answers, "rewards": [1.0, 0.0], "prompt_uid": "p"},
            {"prompt": USER, "completions": answers, "rewards": [1.0, 0.0], "prompt_uid": "p"},
        ]
    )
    put_dataset(sums, dataset, "chat", task_name="sums", tokenizer=tokenizer())
    one, other = stored(sums)
    assert (one.task_name, one.prompt_uid, other.prompt_uid) == ("sums", "p", "p")
    assert one.prompt == USER
    assert one.prompt_ids is not None
    assert one.prompt_ids.tolist() == ids("<user> 2 + 2 = <assistant>")
    assert [each.response_ids.tolist() for each in one.episodes] == [ids("4 <eos>"), ids("5 <eos>")]
    assert one.texts == ["4", "5"]


def test_rows_of_tokens_need_no_tokenizer(sums: blocking.Buffer) -> None:
    row = {"prompt_ids": [1, 2], "completion_ids": [3, 4], "logprobs": [-0.5, -0.25], "reward": 1.0}
    several = {
        "prompt_ids": [1, 2],
        "completion_ids": [[3, 4], [5]],
        "logprobs": [[-0.5, -0.25], [-1.0]],
        "rewards": [1.0, None],
    }
    put_dataset(sums, Dataset.from_list([row, row]), "one")
    put_dataset(sums, Dataset.from_list([several]), "several")
    put_dataset(sums, Dataset.from_list([several]).remove_columns("rewards"), "unrewarded")
    one, other, unrewarded = stored(sums)
    assert [each.response_ids.tolist() for each in unrewarded.episodes] == [[3, 4], [5]]
    assert [each.reward for each in unrewarded.episodes] == [None, None]
    assert [each.token_ids.tolist() for each in one.episodes] == [[1, 2, 3, 4]] * 2
    assert [each.response_ids.tolist() for each in other.episodes] == [[3, 4], [5]]
    behaviour = other.episodes[0].logprobs
    assert behaviour is not None
    assert behaviour.tolist() == [0, 0, -0.5, -0.25]


def call(**arguments: int | None) -> dict[str, Any]:
    function = {"name": "add", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}


#: Messages and call arguments with different keys: Arrow gives all objects of a column all keys.
AGENT = [USER[0], call(a=2), call(b=2), {"role": "tool", "name": "add", "content": "4"}]
#: A template that renders all keys that are present.
CALLS = (
    "{% for message in messages %}{{ message['name'] or '' }} {{ message['content'] or '' }} "
    "{% if 'tool_calls' in message %}{% for call in message['tool_calls'] %}"
    "{% for name in call['function']['arguments'] %}+ {{ call['function']['arguments'][name] }} "
    "{% endfor %}{% endfor %}{% endif %}{% endfor %}"
)


def test_keys_that_arrow_adds_are_not_read(sums: blocking.Buffer) -> None:
    rows = [{"prompt": AGENT, "completion": "4"}]
    typed = Dataset.from_list(rows)
    assert typed[0]["prompt"][0]["tool_calls"] is None
    ways = [
        IterableDataset.from_generator(lambda: iter(rows)),
        typed,
        typed.to_iterable_dataset().map(dict),
        Dataset.from_list(rows, on_mixed_types="use_json"),
    ]
    for way, dataset in enumerate(ways):
        put_dataset(sums, dataset, f"way {way}", tokenizer=tokenizer(CALLS))
    expected = ids("2 + 2 = + 2 + 2 <unk> 4")
    for one in stored(sums):
        assert one.prompt == AGENT
        assert one.episodes[0].prompt_ids.tolist() == expected
    null = [{"prompt": [*USER, call(a=None)], "completion": "4"}]
    json = Dataset.from_list(null, on_mixed_types="use_json")  # this adds no keys
    put_dataset(sums, json, "null", tokenizer=tokenizer(CALLS))
    assert stored(sums)[-1].prompt == null[0]["prompt"]


@pytest.mark.parametrize(("content", "tokens"), [({}, "+ 2"), ({"content": "5"}, "5 + 2")])
def test_tool_calls_round_trip(
    url: str, sums: blocking.Buffer, content: dict[str, str], tokens: str
) -> None:
    answer = [call(a=2) | content]
    dataset = Dataset.from_list([{"prompt": USER, "completion": answer, "reward": 1.0}])
    put_dataset(sums, dataset, "calls", tokenizer=tokenizer(CALLS))
    [episode] = stored(sums)[0].episodes
    assert (episode.text, episode.response_ids.tolist()) == (content.get("content"), ids(tokens))
    [row] = sft_dataset(url, sums.name, streaming=True)
    assert row["completion"] == answer


def test_any_characters_round_trip(url: str, sums: blocking.Buffer) -> None:
    answer = [call(a=2) | {"content": GENERATED}]
    row = {"prompt": USER, "completion": answer, "prompt_ids": [1], "completion_ids": [2]}
    put_dataset(sums, IterableDataset.from_generator(lambda: iter([row | {"reward": 1}])), "any")
    [back] = sft_dataset(url, sums.name, streaming=True)
    assert back["completion"] == answer


@pytest.mark.parametrize("kind", ["numpy", "torch", "pandas", "arrow"])
def test_formats_of_a_dataset_change_nothing(sums: blocking.Buffer, kind: str) -> None:
    texts = [
        {"prompt": USER, "completion": "4", "reward": 1.0, "prompt_uid": "p"},
        {"prompt": USER, "completion": "5", "reward": 0.0, "prompt_uid": "p"},
    ]
    tokens = {"prompt_ids": [1], "completion_ids": [[3, 4], [5]], "logprobs": [[-1, -2], [-3]]}
    for rows in (texts, [tokens]):
        plain = Dataset.from_list(rows)
        formatted = plain.with_format(kind)
        ways: list[Any] = [plain, formatted, formatted.to_iterable_dataset()]
        if kind in ("numpy", "torch"):  # the function receives and returns rows of arrays
            ways.append(formatted.to_iterable_dataset().map(dict))
        if kind == "numpy" and rows is texts:
            ways.append(plain.with_transform(_arrays))
        for way, dataset in enumerate(ways):
            name = f"{len(rows)} rows, way {way}"
            put_dataset(sums, dataset, name, task_name="sums", tokenizer=tokenizer())
        first, *others = stored(sums)
        assert len(others) == len(ways) - 1
        for one in others:
            assert (one.prompt, one.prompt_uid) == (first.prompt, first.prompt_uid)
            assert one.episodes == first.episodes
        sums.delete(tasks="sums")
    chosen = Dataset.from_list(texts).with_format(kind, columns=["prompt", "completion"])
    put_dataset(sums, chosen, "chosen", tokenizer=tokenizer())
    assert [(one.prompt_uid, one.reward_max) for one in stored(sums)] == [(None, None)]


def _arrays(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return {name: [np.asarray(value) for value in values] for name, values in batch.items()}


def _rows(count: int, each: int = 2) -> list[dict[str, Any]]:
    """Return `count` completions, `each` per prompt."""
    return [
        {"prompt_ids": [i // each], "completion_ids": [i], "reward": float(i % each)}
        for i in range(count)
    ]


@pytest.mark.parametrize("streamed", [False, True], ids=["dataset", "iterable"])
def test_an_interrupted_import_resumes(
    sums: blocking.Buffer, streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(incoming, "PAGE", 2)
    rows = _rows(14)
    broken = [*rows[:9], {"prompt_ids": None, "completion_ids": None, "reward": None}]

    def dataset(of: list[dict[str, Any]]) -> Dataset | IterableDataset:
        return IterableDataset.from_generator(of.__iter__) if streamed else Dataset.from_list(of)

    with pytest.raises(rdb.InvalidInputError, match="row 9"):
        put_dataset(sums, dataset(broken), "d")
    assert sums.cursor("dataset/d") == 8
    assert put_dataset(sums, dataset(rows), "d") == 3
    assert put_dataset(sums, dataset(rows), "d") == 0
    assert [one.group_uid for one in sums.find()] == [f"d/{i}" for i in range(0, 14, 2)]
    assert {one.num_episodes for one in sums.find()} == {2}
    assert put_dataset(sums, dataset(_rows(16)), "d") == 1  # one more group than before


def test_two_imports_at_once_put_each_row_once(url: str, sums: blocking.Buffer) -> None:
    dataset = Dataset.from_list(_rows(400))
    failures: list[BaseException] = []

    def work() -> None:
        try:
            with blocking.Store.open(url) as store:
                put_dataset(store.buffer("sums"), dataset, "d")
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=work) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures
    assert [one.group_uid for one in sums.find()] == [f"d/{i}" for i in range(0, 400, 2)]
    assert sums.cursor("dataset/d") == 400


_CHILD = """
import sys, time
from datasets import IterableDataset
from replaydb import blocking
from replaydb.integrations.datasets import put_dataset

def rows():
    for i in range(1000):
        if i == 500:
            print("half", flush=True)
            time.sleep(600)
        yield {"prompt_ids": [i // 2], "completion_ids": [i], "reward": float(i % 2)}

with blocking.Store.open(sys.argv[1]) as store:
    put_dataset(store.buffer("sums"), IterableDataset.from_generator(rows), "d")
"""


@postgresql_nightly
def test_an_import_survives_kill(url: str, sums: blocking.Buffer) -> None:
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", _CHILD, url], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "half\n"
        child.kill()
    before = sums.count()
    assert 0 < before < 250
    assert sums.cursor("dataset/d") == 2 * before
    assert put_dataset(sums, Dataset.from_list(_rows(1000)), "d") == 500 - before
    groups = stored(sums)
    assert [one.group_uid for one in groups] == [f"d/{i}" for i in range(0, 1000, 2)]
    assert [one.episodes[1].response_ids.tolist() for one in groups] == [
        [i] for i in range(1, 1000, 2)
    ]


TEXT = {"prompt": "2 + 2 =", "completion": "4", "reward": 1.0}
TOKENS = {"prompt_ids": [1], "completion_ids": [2], "reward": 1.0}
REFUSED = [
    ({"prompt": "2", "reward": 1.0}, "row 0", "completion"),
    ({**TEXT, "prompt": USER, "completion": []}, "completion of row 0", "one message"),
    ({**TEXT, "completion": USER}, "completion of row 0", "assistant"),
    ({"prompt": "2", "completions": ["4", "5"], "rewards": [1.0]}, "row 0", "one length"),
    ({**TEXT, "reward": float("nan")}, "reward", "nan"),
    ({**TEXT, "completion_ids": [8], "logprobs": [-0.5]}, "row 0", "both, with completion_ids"),
    ({**TEXT, "prompt_ids": [9]}, "row 0", "both, with prompt_ids"),
    ({**TEXT, "logprobs": [-0.5, -0.25]}, "row 0", "both, with logprobs"),
    ({"prompt": "2", "completion": "4", "rewards": [1.0, 0.0]}, "row 0", "as lists, like rewards"),
    ({"prompt": "2", "completions": 5}, "row 0", "one length"),
    ({"prompt": "2", "completions": "45"}, "row 0", "one length"),
    ({**TEXT, "completion": 5}, "completion of row 0", "one message"),
    ({**TEXT, "completion": [call(a=2)]}, "completion of row 0", "because the prompt is text"),
    ({**TEXT, "completion": {"content": "4"}}, "completion of row 0", "one message"),
    ({**TEXT, "prompt": []}, "prompt of row 0", "text, or messages"),
    ({**TOKENS, "logprobs": [0.5]}, "logprobs of row 0", "values of at most 0"),
    ({**TOKENS, "logprobs": [float("inf")]}, "logprobs", "-inf or NaN"),
]


@pytest.mark.parametrize(
    ("row", "field", "words"), REFUSED, ids=[f"{one[1]}-{i}" for i, one in enumerate(REFUSED)]
)
def test_refused_rows(sums: blocking.Buffer, row: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(rdb.InvalidInputError) as caught:
        put_dataset(sums, Dataset.from_list([row]), "d", tokenizer=tokenizer())
    assert caught.value.field == field
    assert words in str(caught.value)
    assert caught.value.__notes__ == ["in rows 0 to 0 of the dataset 'd'"]
    assert sums.count() == 0


def test_refused_calls(sums: blocking.Buffer) -> None:
    dataset = Dataset.from_list([TEXT])
    with pytest.raises(
        rdb.InvalidInputError, match="tokenizer: expected a tokenizer, because row 0"
    ):
        put_dataset(sums, dataset, "d")
    with pytest.raises(rdb.InvalidInputError, match="tags of row 0: expected a column 'level'"):
        put_dataset(sums, dataset, "d", tokenizer=tokenizer(), tags=["level"])
    with pytest.raises(rdb.InvalidInputError, match="dataset: expected a Dataset"):
        put_dataset(sums, [TEXT], "d", tokenizer=tokenizer())
    broken = tokenizer("{{ messages[0]['content'] + 1 }}")
    with pytest.raises(rdb.InvalidInputError, match=r"row 0: expected .* accept, got TypeError"):
        put_dataset(sums, Dataset.from_list([{**TEXT, "prompt": USER}]), "d", tokenizer=broken)
    other = tokenizer("{{ messages | length }}")
    with pytest.raises(rdb.InvalidInputError, match="chat template"):
        put_dataset(sums, Dataset.from_list([{**TEXT, "prompt": USER}]), "d", tokenizer=other)
