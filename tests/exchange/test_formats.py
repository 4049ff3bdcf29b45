"""Rows written to a file are read back as the same bytes; invalid files are refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from replaydb import Episode, EpisodeGroup, Turn, codec
from replaydb.analysis.episode_columns import episode_schema
from replaydb.analysis.episode_rows import batch_of_empty, batch_of_episodes
from replaydb.codec import sharing
from replaydb.domain.episodes.turns import MARKS
from replaydb.errors import InvalidInputError
from replaydb.exchange import regrouping
from replaydb.exchange.formats import WRITERS, Format, names_of, rows_of
from replaydb.exchange.regrouping import groups_in
from support import samples
from support.decoded import decoded_group
from support.examples import examples
from support.groups import conversation, group

FORMATS: list[Format] = ["parquet", "jsonl"]


def written(path: Path, kind: Format, groups: list[EpisodeGroup]) -> str:
    """Write a file of groups; return its name."""
    writer = WRITERS[kind](path, episode_schema())
    for one in groups:
        decoded = decoded_group(one)
        batch = batch_of_episodes if decoded.rows else batch_of_empty
        writer.write(batch(episode_schema(), [decoded]))
    writer.close()
    return f"some.{kind}"


@st.composite
def any_group(draw: st.DrawFn) -> EpisodeGroup:
    """Generate a group of any form, new or read, with a status that a put accepts."""
    several = draw(samples.forests)
    if draw(st.booleans()):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sharing, "LEAST_SHARED", 1)
            several = codec.decode([part.data for part in codec.encode(several)]).episodes
    context = draw(samples.contexts)
    return EpisodeGroup(
        draw(samples.text.filter(bool)),
        several,
        prompt_uid=draw(st.none() | samples.text.filter(bool)),
        priority=draw(st.floats(0, 1e9)),
        status=draw(
            st.sampled_from(["completed", "aborted"] if several else ["aborted", "failed"])
        ),
        tags=draw(samples.tags),
        expected_episodes=draw(st.none() | st.integers(max(1, len(several)), 9)),
        prompt=context.prompt,
        prompt_ids=context.prompt_ids,
        extras=context.extras,
    )


@pytest.mark.parametrize("kind", FORMATS)
@settings(max_examples=examples(25), deadline=None, suppress_health_check=list(HealthCheck))
@given(several=st.lists(any_group(), min_size=1, max_size=3))
def test_groups_round_trip(
    tmp_path_factory: pytest.TempPathFactory, kind: Format, several: list[EpisodeGroup]
) -> None:
    path = tmp_path_factory.mktemp("exchange") / "file"
    name = written(path, kind, several)
    found = [one.group for one in groups_in(rows_of(path, name), name)]
    assert found == several


@pytest.mark.parametrize("kind", FORMATS)
def test_files_of_earlier_versions(tmp_path: Path, kind: Format) -> None:
    """Their turns have whole contexts, and neither parents nor extras without a last value."""
    given = EpisodeGroup("math", [*samples.sample_episodes(), conversation()])
    written(tmp_path / "new", kind, [given])
    rows = list(rows_of(tmp_path / "new", f"new.{kind}"))
    added = {"parent", "shared", "short_extras", "context_extras", *MARKS}
    for row in rows:
        for turn in row["turns"] or ():
            assert added <= turn.keys()
            row["turns"] = [
                {k: v for k, v in turn.items() if k not in added} for turn in row["turns"]
            ]
    [found] = groups_in(rows, "old")
    assert found.group == given


@pytest.mark.parametrize("kind", FORMATS)
def test_turns_with_parents_have_their_own_tokens(tmp_path: Path, kind: Format) -> None:
    """Also in extras, although these do not cover the last token of each turn."""
    turns: list[Turn] = []
    for i in range(15):
        length = 1000 + 20 * i
        context = (
            {"prompt_ids": range(length)} if not i else {"new_ids": range(10), "parent": turns[-1]}
        )
        experts = np.arange(length + 9, dtype=np.uint16)
        turns.append(Turn(**context, response_ids=range(10), token_extras={"experts": experts}))
    given = EpisodeGroup("math", [Episode(turns=turns)])
    name = written(tmp_path / "file", kind, [given])
    [row] = rows_of(tmp_path / "file", name)
    assert len(row["token_ids"]) == row["num_tokens"] == 1000 + 10 + 14 * 20
    extras = [
        *row["token_extras"],
        *(one for turn in row["turns"] for one in turn["context_extras"] or ()),
    ]
    assert sum(math.prod(one["shape"]) for one in extras) == row["num_tokens"] + 14
    [found] = groups_in(rows_of(tmp_path / "file", name), name)
    assert found.group == given


def test_whole_contexts_of_turns_are_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their number of values would be quadratic in the number of turns."""
    experts = np.arange(2000, dtype=np.uint16)
    extras = {"experts": experts[:100], "short": experts[:99], "answer": experts[:50]}
    turns = [Turn(prompt_ids=range(50), response_ids=range(50), token_extras=extras)]
    for end in range(200, 2000, 100):
        extras = {"experts": experts[:end], "short": experts[: end - 1], "answer": experts[:50]}
        turns.append(
            Turn(parent=turns[-1], new_ids=range(50), response_ids=range(50), token_extras=extras)
        )
    given = EpisodeGroup("math", [Episode(turns=turns)])
    name = written(tmp_path / "file", "parquet", [given])
    parents = []

    def values(turn: Any, *args: Any) -> Any:
        parents.append(turn["parent"])
        return whole(turn, *args)

    whole = regrouping._values
    monkeypatch.setattr(regrouping, "_values", values)
    [found] = groups_in(rows_of(tmp_path / "file", name), name)
    assert parents == [None] * 3
    assert found.group == given


@pytest.mark.parametrize("kind", FORMATS)
def test_extras_of_a_turn_that_leaves_its_parent_early(tmp_path: Path, kind: Format) -> None:
    """It begins with tokens of its grandparent, for which the parent has other values."""
    experts = np.arange(400, dtype=np.uint16)
    other = np.where(np.arange(400) < 30, experts, experts + 1)
    first = Turn(
        prompt_ids=range(50), response_ids=range(50), token_extras={"experts": experts[:100]}
    )
    second = Turn(
        parent=first,
        prompt_ids=[*range(50), *range(30), 7],
        response_ids=[8, 9],
        token_extras={"experts": other[:83]},
    )
    turns = [first, second]
    for values in (experts, other):
        turns += [
            Turn(
                parent=second,
                prompt_ids=[*second.segment.tokens(0, shared), 5],
                response_ids=[6],
                token_extras={"experts": values[: shared + 2]},
            )
            for shared in (20, 60, 80, 81, 83)
        ]
    given = EpisodeGroup("math", [Episode(turns=turns)])
    name = written(tmp_path / "file", kind, [given])
    [found] = groups_in(rows_of(tmp_path / "file", name), name)
    assert found.group == given
    [stored] = found.group.episodes
    assert codec.decode([part.data for part in codec.encode([stored])]).episodes == [stored]


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("prompt", [[], [1], [1, 2]])
def test_extras_of_all_but_the_last_token(tmp_path: Path, kind: Format, prompt: list[int]) -> None:
    """With a prompt of one token, too, where they have as many values as the response."""
    ids = [*prompt, 5, 6]
    mask = [False] * len(prompt) + [True, True]
    extras = {"ref": np.arange(1, len(ids), dtype=np.float32)}
    given = EpisodeGroup("math", [Episode(token_ids=ids, loss_mask=mask, token_extras=extras)])
    name = written(tmp_path / "file", kind, [given])
    [found] = groups_in(rows_of(tmp_path / "file", name), name)
    assert found.group == given


@pytest.mark.parametrize("kind", FORMATS)
def test_floats_round_trip_to_the_bit(tmp_path: Path, kind: Format) -> None:
    """All kinds of NaN, infinities, and both zeros."""
    odd = [0x7FC00001, 0x7F800001, 0x7FC00000, 0xFFC00000, 0x7F800000, 0xFF800000, 0x80000000, 1]
    numbers = np.array(odd, np.uint32).view(np.float32)
    logprobs = np.where(np.isinf(numbers), np.float32(-0.5), numbers)  # which are not infinite
    # The column of that name is float32.
    extras = {"token_rewards": np.full(8, 0.1), "values": numbers}
    given = EpisodeGroup(
        "math",
        [
            Episode(prompt_ids=[], response_ids=[1] * 8, logprobs=logprobs, text="\u2028ø",
                    token_extras=extras)
        ],
    )  # fmt: skip
    name = written(tmp_path / "file", kind, [given])
    [found] = groups_in(rows_of(tmp_path / "file", name), name)
    assert found.group == given


@pytest.mark.parametrize("kind", FORMATS)
def test_a_reward_that_token_rewards_only_round_to_is_kept(tmp_path: Path, kind: Format) -> None:
    turn = Turn(prompt_ids=[1], response_ids=[2, 3], token_rewards=[0.1, 0.2], reward=0.3)
    name = written(tmp_path / "file", kind, [EpisodeGroup("math", [Episode(turns=[turn])])])
    [found] = groups_in(rows_of(tmp_path / "file", name), name)
    assert found.group.episodes[0].turns == (turn,)


def test_parquet_is_compressed_and_typed(tmp_path: Path) -> None:
    written(tmp_path / "file", "parquet", [group(str(i)) for i in range(3)])
    file = pq.ParquetFile(tmp_path / "file")
    assert file.schema_arrow.equals(episode_schema())
    assert file.metadata.num_row_groups == 1
    assert file.metadata.row_group(0).column(0).compression == "ZSTD"


#: Rows of two turns of five tokens, of which the second has one more from its parent.
TURN: dict[str, Any] = {
    "num_tokens": 2, "prompt_length": 1, "reward": None, "policy_version": None,
    "token_versions": None, "has_logprobs": False, "has_token_rewards": False,
    "finish_reason": None, "metadata": None, "token_extras": ["x"],
}  # fmt: skip
SECOND = TURN | {"num_tokens": 4, "prompt_length": 3, "parent": 0, "shared": 1}
EXTRA = {"name": "x", "dtype": "int8", "shape": [5], "data": "AQIDBAU="}
WRONG_TURNS: list[dict[str, Any]] = [
    {"parent": 1},
    {"parent": -1},
    {"parent": 0.0},
    {"parent": None},
    {"shared": -1, "num_tokens": 2, "prompt_length": 1},
    {"shared": 3, "num_tokens": 6, "prompt_length": 4},  # more than its parent has
    {"shared": 1, "prompt_length": 0},
    {"context_extras": 5},
    {"context_extras": [EXTRA]},  # more than are shared
    {"context_extras": [{**EXTRA, "dtype": "uint8", "shape": [1], "data": "AQ=="}]},
    {"context_extras": [EXTRA | {"shape": [1]}]},
    {"uid": ""},
    {"agent": 5},
    {"state": ["a"]},
    {"is_discarded": 1},
]


def test_a_turn_with_some_tokens_of_its_parent(tmp_path: Path) -> None:
    name = written(tmp_path / "file", "jsonl", [group("a", rewards=(1.0,))])
    row = json.loads((tmp_path / "file").read_text(encoding="utf8"))
    row |= {"turns": [TURN, SECOND], "token_extras": [EXTRA]}
    (tmp_path / "file").write_text(json.dumps(row), encoding="utf8")
    [found] = groups_in(rows_of(tmp_path / "file", name), name)
    first, second = found.group.episodes[0].turns
    assert second.parent is first
    assert second.prompt_ids.tolist() == [1, 3, 4]
    assert second.token_extras["x"].tolist() == [0, 3, 4, 5]


@pytest.mark.parametrize(
    "damage",
    [
        {"group_uid": None},
        {"task_name": None},
        {"token_ids": [1, 2, 3]},
        {"loss_mask": [2, 0, 0, 0, 0]},
        {"group_status": "done"},
        {"tags": "[1]"},
        {"tags": "{"},
        {"metadata": '{"x": NaN}'},
        {"prompt_length": 9},
        {"extras": [{"name": "x", "dtype": "object", "shape": [1], "data": "AA=="}]},
        {"extras": [{"name": "x", "dtype": "int64", "shape": [1], "data": "AA=="}]},
        {"extras": [{"name": "x", "dtype": "bool", "shape": [1], "data": "Ag=="}]},
        {"extras": [{"name": "x"}]},
        {"turns": [{"num_tokens": 9, "prompt_length": 1}]},
        *({"turns": [TURN, SECOND | change], "token_extras": [EXTRA]} for change in WRONG_TURNS),
        {"logprobs": ["nothing"] * 5},
        {"logprobs": ["12"] * 5},
        {"logprobs": [None] * 5},
        {"logprobs": ["NaN", -1e39, 0.0, 0.0, 0.0]},
        {"logprobs": [-1e39, 0.0, 0.0, 0.0, 0.0]},
        {"advantage": 1e39},
        {"token_ids": [1.5] * 5},
        {"token_ids": ["1"] * 5},
        {"token_ids": [2**40] * 5},
        {"token_ids": 5},
        {"token_versions": [1.0] * 5},
        {"loss_mask": ["False"] * 5},
        {"prompt_length": True},
        {"group_id": 1.5},
        {"num_episodes": 2},
        {"metadata": "[" * 100_000},
        {"extras": [{"name": "x", "dtype": "int8", "shape": [-1], "data": "AA=="}]},
        {"extras": [{"name": "x", "dtype": "int8", "shape": [1], "data": "AA=="}] * 2},
        *[
            {name: [{"name": "x", "dtype": "int8", "shape": [1], "data": "AA==", "counts": counts}]}
            for name, counts in (
                ("token_extras", [1]),
                ("token_extras", [0, 0, 0, 0, 2]),
                ("token_extras", [-1, 2, 0, 0, 0]),
                ("token_extras", ["1", 0, 0, 0, 0]),
                ("token_extras", 1),
                ("extras", [1]),
            )
        ],
    ],
    ids=lambda damage: str(damage)[:60],
)
def test_invalid_rows(tmp_path: Path, damage: dict[str, Any]) -> None:
    name = written(tmp_path / "file", "jsonl", [group("a", rewards=(1.0,))])
    [line] = (tmp_path / "file").read_text(encoding="utf8").splitlines()
    (tmp_path / "file").write_text(json.dumps(json.loads(line) | damage), encoding="utf8")
    with pytest.raises(InvalidInputError, match=r"some.jsonl, (line 1|group)"):
        list(groups_in(rows_of(tmp_path / "file", name), name))


@pytest.mark.parametrize("name", ["some.parquet", "some.jsonl"])
@pytest.mark.parametrize("content", [b"PAR1 or so\n", b"[" * 100_000])
def test_invalid_files(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    for read in (rows_of, names_of):
        with pytest.raises(InvalidInputError, match=name):
            list(read(tmp_path / "file", name))


@pytest.mark.parametrize("change", [{"tags": '{"a":1}'}, {"task_name": "b"}, {"position": 0}])
def test_rows_of_a_group_that_contradict_each_other(tmp_path: Path, change: dict[str, Any]) -> None:
    name = written(tmp_path / "file", "jsonl", [group("a", rewards=(1.0, 0.0))])
    first, second = map(json.loads, (tmp_path / "file").read_text(encoding="utf8").splitlines())
    lines = json.dumps(first), json.dumps(second | change)
    (tmp_path / "file").write_text("\n".join(lines), encoding="utf8")
    with pytest.raises(InvalidInputError, match=f"group 'a', {next(iter(change))}: expected"):
        list(groups_in(rows_of(tmp_path / "file", name), name))


def test_rows_with_the_required_columns_only(tmp_path: Path) -> None:
    """Other values have the defaults of `EpisodeGroup`."""
    table = pa.table(
        {
            "group_uid": ["a", "a", "b"],
            "task_name": ["math"] * 3,
            "token_ids": [[1, 2], [3], []],
            "loss_mask": [[False, True], [True], []],
            "reward": [1.0, None, 0.0],
        }
    )
    pq.write_table(table, tmp_path / "some.parquet")
    first, second = groups_in(rows_of(tmp_path / "some.parquet", "some.parquet"), "some.parquet")
    assert [one.reward for one in first.group.episodes] == [1.0, None]
    assert first.group.status == "completed"
    assert (first.buffer, first.run, second.group.num_tokens) == (None, (None, None), 0)
    [names] = names_of(tmp_path / "some.parquet", "some.parquet")
    assert names["group_uid"].to_pylist() == ["a", "b"]
    logprobs = pa.array([[None, -0.5], [0.0], []], pa.list_(pa.float32()))
    pq.write_table(table.append_column("logprobs", logprobs), tmp_path / "some.parquet")
    with pytest.raises(InvalidInputError, match="group 'a', logprobs"):
        list(groups_in(rows_of(tmp_path / "some.parquet", "some.parquet"), "some.parquet"))
