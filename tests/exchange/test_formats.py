"""Rows written to a file are read back as the same bytes; invalid files are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from replaydb import Episode, EpisodeGroup, Turn
from replaydb.analysis.episode_columns import episode_schema
from replaydb.analysis.episode_rows import batch_of_empty, batch_of_episodes
from replaydb.errors import InvalidInputError
from replaydb.exchange.formats import WRITERS, Format, names_of, rows_of
from replaydb.exchange.regrouping import groups_in
from support import payloads, samples
from support.decoded import decoded_group
from support.examples import examples
from support.groups import group

FORMATS: list[Format] = ["parquet", "jsonl"]


def written(path: Path, kind: Format, groups: list[EpisodeGroup]) -> str:
    """Write a file of groups; return its name."""
    writer = WRITERS[kind](path, episode_schema())
    for one in groups:
        decoded = decoded_group(one)
        batch = batch_of_episodes if decoded.parts else batch_of_empty
        writer.write(batch(episode_schema(), [decoded]))
    writer.close()
    return f"some.{kind}"


def encoded(one: EpisodeGroup) -> bytes:
    return bytes(payloads.encode(one.episodes, one.context))


@st.composite
def any_group(draw: st.DrawFn) -> EpisodeGroup:
    """Generate a group of any form, with a status that a put accepts."""
    several = draw(st.lists(samples.episode(), max_size=3))
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
def test_groups_round_trip_to_the_same_bytes(
    tmp_path_factory: pytest.TempPathFactory, kind: Format, several: list[EpisodeGroup]
) -> None:
    path = tmp_path_factory.mktemp("exchange") / "file"
    name = written(path, kind, several)
    found = [one.group for one in groups_in(rows_of(path, name), name)]
    assert [encoded(one) for one in found] == [encoded(one) for one in several]
    for one, other in zip(found, several, strict=True):
        assert one == other
        assert one.texts == other.texts


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
    assert encoded(found.group) == encoded(given)
    assert found.group.texts == given.texts


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
