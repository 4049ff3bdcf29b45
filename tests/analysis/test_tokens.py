"""Arrow tables of episodes with tokens: every field, with null for missing values."""

from __future__ import annotations

import json
import math
from typing import Any

import duckdb
import numpy as np
import polars as pl
import pyarrow as pa
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import update

import replaydb as rdb
from replaydb import Buffer, Episode, EpisodeGroup, Ragged, Store, Turn, analysis
from replaydb.analysis import decoded as reading
from replaydb.analysis import decoded_groups
from replaydb.analysis.decoded_groups import in_batches
from replaydb.analysis.episode_columns import episode_schema
from replaydb.analysis.episode_rows import batch_of_episodes
from replaydb.database.tables.schema import payload
from replaydb.domain.episodes.arrays import bits, dtype_name
from replaydb.errors import CorruptPayloadError, InvalidInputError, NotSupportedError
from replaydb.util import escapes
from support import samples
from support.connections import transaction
from support.decoded import decoded_group
from support.engines import postgresql_nightly
from support.examples import examples
from support.groups import conversation, episode, group, groups, long_group

Rows = list[dict[str, Any]]


def array_row(name: str, array: Any) -> dict[str, Any]:
    ragged = isinstance(array, Ragged)
    values = array.values if ragged else array
    return {
        "name": name,
        "dtype": dtype_name(array),
        "shape": list(values.shape),
        "data": bits(values).tobytes(),
        "counts": array.counts.tolist() if ragged else None,
    }


def same_numbers(row: list[Any] | None, array: Any) -> bool:
    """Whether a list and an array are equal to the bit, except for the bits of NaN."""
    if row is None or array is None:
        return row is None and array is None
    return bool(
        np.array_equal(np.array(row, array.dtype), array, equal_nan=array.dtype.kind == "f")
    )


def check_row(row: dict[str, Any], one: Episode) -> None:
    """Check that a row matches its episode."""
    versions = one.policy_version
    single = versions if isinstance(versions, int) else None
    assert same_numbers(row["token_ids"], one.token_ids)
    assert same_numbers(row["loss_mask"], one.loss_mask)
    assert same_numbers(row["logprobs"], one.logprobs)
    per_token = versions if isinstance(versions, np.ndarray) else None
    assert same_numbers(row["token_versions"], per_token)
    assert (row["policy_version"], row["min_policy_version"], row["max_policy_version"]) == (
        single, one.min_policy_version, one.max_policy_version
    )  # fmt: skip
    for name in ("reward", "advantage", "finish_reason", "text", "num_tokens", "num_loss_tokens",
                 "num_turns", "prompt_length"):  # fmt: skip
        assert row[name] == getattr(one, name), name
    assert escapes.from_json(row["metadata"]) == one.metadata
    for name in ("token_extras", "extras"):
        expected = {key: array_row(key, value) for key, value in getattr(one, name).items()}
        assert {each["name"]: each for each in row[name] or []} == expected
        assert row[name] != []
    assert (row["turns"] is None) == (not one.turns)
    for turn, own in zip(row["turns"] or [], one.turns, strict=True):
        assert turn["num_tokens"] == own.num_tokens
        assert turn["reward"] == own.reward
        assert turn["has_logprobs"] == (own.logprobs is not None)
        own_versions = own.policy_version if isinstance(own.policy_version, np.ndarray) else None
        assert same_numbers(turn["token_versions"], own_versions)
        assert turn["has_token_rewards"] == (own.token_rewards is not None)
        assert turn["token_extras"] == list(own.token_extras)
        assert escapes.from_json(turn["metadata"]) == own.metadata
        for name in ("uid", "agent", "state", "is_discarded"):
            assert turn[name] == getattr(own, name)


def rich() -> list[EpisodeGroup]:
    """Return groups with every form of episode, and groups without episodes."""
    first = Episode(prompt_ids=[1, 2], response_ids=[], text="")
    return [
        EpisodeGroup(
            "math",
            [
                *samples.sample_episodes(),
                conversation(),
                first,
                Episode(token_ids=[], loss_mask=[]),
            ],
            group_uid="rich",
            prompt_uid="p/1",
            priority=0.25,
            tags={"level": "hard", "deep": {"数": [1, None]}},
            prompt=[{"role": "user", "content": "1 + 1"}],
            prompt_ids=[5, 6],
            extras={"image": np.arange(6, dtype=np.uint8).reshape(2, 3)},
        ),
        EpisodeGroup(
            "math", [episode(None), episode(0.5, 7, finish_reason="stop")], prompt="plain"
        ),
        EpisodeGroup("math", [], status="aborted", prompt="to be rolled", expected_episodes=4),
        EpisodeGroup("math", [], status="failed"),
    ]


@postgresql_nightly
@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("layout", ["inside", "outside"])
async def test_every_field_of_every_episode(
    store: Store, url: str, monkeypatch: pytest.MonkeyPatch, compression: Any
) -> None:
    monkeypatch.setattr(reading, "CHUNK_GROUPS", 3)
    buffer = await store.buffer("math", compression=compression)
    given = rich()
    await buffer.put(given)
    await buffer.open_group("math", "open", 4, prompt="one by one")
    for position in (2, 0):
        await buffer.add_episode("open", episode(float(position)), position=position)
    await buffer.put(group("last", rewards=(0.0, 1.0, 0.0)))
    table = analysis.tokens(url).to_table()
    table.validate(full=True)
    rows = table.to_pylist()
    complete = [one for stored in given for one in stored.episodes]
    for row, one in zip(rows[: len(complete)], complete, strict=True):
        check_row(row, one)
    assert [(row["position"], row["reward"]) for row in rows[len(complete) :]] == [
        (0, 0.0), (2, 2.0), (0, 0.0), (1, 1.0), (2, 0.0)
    ]  # fmt: skip
    first, second, of_second = rows[0], rows[1], rows[6]
    assert json.loads(first["tags"]) == given[0].tags
    assert json.loads(second["prompt"]) == given[0].prompt
    assert json.loads(of_second["prompt"]) == "plain"
    assert (first["group_uid"], first["prompt_uid"], first["priority"]) == ("rich", "p/1", 0.25)
    assert (first["buffer_name"], first["run_name"], first["group_status"]) == (
        "math", "test", "completed"
    )  # fmt: skip
    # Prompt ids and extras of a group are in its first row only.
    assert (first["group_prompt_ids"], second["group_prompt_ids"]) == ([5, 6], None)
    assert first["group_extras"] == [array_row("image", given[0].extras["image"])]
    assert second["group_extras"] is None
    assert rows[-5]["group_status"] == "pending"


@settings(max_examples=examples(25), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    several=st.lists(samples.episode(is_ragged=True), min_size=1, max_size=3),
    context=samples.contexts,
)
def test_flat_episodes_become_list_columns(several: list[Episode], context: Any) -> None:
    made = EpisodeGroup("t", [*several, several[0]])
    made.context = context
    decoded = decoded_group(made)
    batch = batch_of_episodes(episode_schema(), [decoded])
    batch.validate(full=True)
    for row, one in zip(batch.to_pylist(), [*several, several[0]], strict=True):
        check_row(row, one)


async def test_a_large_payload_is_not_copied(buffer: Buffer, url: str) -> None:
    """The list column is a view of the bytes that were read."""
    await buffer.put(long_group("long", 500_000))
    for batch in analysis.tokens(url).reader():
        ids = batch["token_ids"].flatten()
        blob = ids.buffers()[1]
        assert len(ids) == 500_000
        # The array is a view of the whole payload.
        assert not blob.is_mutable
        assert ids.to_numpy(zero_copy_only=True)[-1] == 499_999


@postgresql_nightly
async def test_rows_of_tokens(buffer: Buffer, url: str) -> None:
    given = [
        Episode(
            prompt_ids=[1, 2],
            response_ids=[3],
            reward=0.5,
            logprobs=[-0.25],
            policy_version=[4, 4, 5],
            token_extras={"ref": [0.0, 0.5, 1.0]},
        ),
        Episode(token_ids=[], loss_mask=[]),
        Episode(prompt_ids=[7], response_ids=[8], policy_version=3),
        Episode(
            turns=[
                Turn(prompt_ids=[9], response_ids=[10], token_rewards=[2.0]),
                Turn(prompt_ids=[9, 10], response_ids=[11]),
            ]
        ),
        Episode(prompt_ids=[5], response_ids=[6], token_extras={"token_rewards": np.array([0, 1])}),
    ]
    await buffer.put(EpisodeGroup("math", given, prompt_uid="p"))
    rows = analysis.tokens(url, per="token", extras={"ref": "float32"})
    table = rows.to_table()
    table.validate(full=True)
    names = ("position", "token_index", "token_id", "is_prompt", "loss_mask", "logprob",
             "token_version", "token_reward", "reward", "ref")  # fmt: skip
    assert [tuple(row[name] for name in names) for row in table.to_pylist()] == [
        (0, 0, 1, True, False, 0.0, 4, None, 0.5, 0.0),
        (0, 1, 2, True, False, 0.0, 4, None, 0.5, 0.5),
        (0, 2, 3, False, True, -0.25, 5, None, 0.5, 1.0),
        (2, 0, 7, True, False, None, 3, None, None, None),
        (2, 1, 8, False, True, None, 3, None, None, None),
        (3, 0, 9, True, False, None, None, 0.0, 2.0, None),
        (3, 1, 10, False, True, None, None, 2.0, 2.0, None),
        (3, 2, 9, True, False, None, None, 0.0, 2.0, None),
        (3, 3, 10, True, False, None, None, 0.0, 2.0, None),
        (3, 4, 11, False, True, None, None, 0.0, 2.0, None),
        (4, 0, 5, True, False, None, None, 0.0, None, None),
        (4, 1, 6, False, True, None, None, 1.0, None, None),
    ]
    assert set(table["task_name"].to_pylist()) == {"math"}
    assert pa.types.is_dictionary(table.schema.field("task_name").type)
    assert len(pl.DataFrame(rows)) == len(rows.to_pandas()) == 12
    with duckdb.connect() as connection:
        connection.register("tokens", rows)
        found = connection.sql("SELECT task_name, sum(token_id) FROM tokens GROUP BY 1")
        assert found.fetchall() == [("math", 81)]


async def test_turns_with_parents(buffer: Buffer, url: str) -> None:
    """Rows have the tokens that a turn does not have from its parent."""
    first = Turn(prompt_ids=[1, 2], response_ids=[3], logprobs=[-0.5], policy_version=[4])
    second = Turn(parent=first, new_ids=[4], response_ids=[5, 6], policy_version=7,
                  token_extras={"ref": [0, 1, 2, 3, 4]})  # fmt: skip
    third = Turn(parent=first, prompt_ids=[1, 9], response_ids=[8], loss_mask=[False],
                 token_rewards=[2.0], policy_version=7)  # fmt: skip
    ids = np.arange(12, dtype=np.int16)
    one = Episode(turns=[first, second, third], token_extras={"joint": ids})
    await buffer.put(EpisodeGroup("math", [one]))
    [row] = analysis.tokens(url).to_table().to_pylist()
    assert (row["num_tokens"], row["num_loss_tokens"], row["prompt_length"]) == (8, 3, 2)
    assert row["token_ids"] == [1, 2, 3, 4, 5, 6, 9, 8]
    assert [(turn["parent"], turn["shared"], turn["num_tokens"]) for turn in row["turns"]] == [
        (None, 0, 3), (0, 3, 6), (0, 1, 3)
    ]  # fmt: skip
    assert [turn["short_extras"] for turn in row["turns"]] == [[], ["ref"], []]
    table = analysis.tokens(url, per="token", extras={"ref": "int64", "joint": "int8"}).to_table()
    names = ("token_id", "is_prompt", "loss_mask", "logprob", "token_version", "token_reward",
             "ref", "joint")  # fmt: skip
    found = [tuple(row[name] for name in names) for row in table.to_pylist()]
    assert str(found) == str([
        (1, True, False, 0.0, 4, 0.0, 0, 0),
        (2, True, False, 0.0, 4, 0.0, 0, 1),
        (3, False, True, -0.5, 4, 0.0, 0, 2),
        (4, True, False, 0.0, 7, 0.0, 3, 6),
        (5, False, True, math.nan, 7, 0.0, 4, 7),
        (6, False, True, math.nan, 7, 0.0, 0, 8),
        (9, True, False, 0.0, 7, 0.0, 0, 10),
        (8, False, False, math.nan, 7, 2.0, 0, 11),
    ])  # fmt: skip


async def test_extras_without_a_last_value(buffer: Buffer, url: str) -> None:
    given = [
        Episode(prompt_ids=[1, 2], response_ids=[3], token_extras={"ref": np.array([7, 8])}),
        Episode(prompt_ids=[1, 2], response_ids=[4]),
        Episode(prompt_ids=[1, 2], response_ids=[5], token_extras={"ref": np.array([7, 8, 9])}),
    ]
    await buffer.put(EpisodeGroup("math", given))
    table = analysis.tokens(url, per="token", extras={"ref": "int64"}).to_table()
    assert table["ref"].to_pylist() == [7, 8, None, None, None, None, 7, 8, 9]
    assert [
        one[0]["shape"] if one else None
        for one in analysis.tokens(url).to_table()["token_extras"].to_pylist()
    ] == [[2], None, [3]]


async def test_ragged_extras_are_in_one_column(buffer: Buffer, url: str) -> None:
    """Without the tokens that a turn has from its parent."""
    values = [
        Ragged.of([[7], [], [1, 2]], np.int16),
        Ragged.of([[7], [], [1, 2], [3], []], np.int16),
    ]
    one = Turn(prompt_ids=[1, 2], response_ids=[3], token_extras={"x": values[0]})
    other = Turn(parent=one, new_ids=[4], response_ids=[5], token_extras={"x": values[1]})
    await buffer.put(EpisodeGroup("math", [Episode(turns=[one, other])]))
    [row] = analysis.tokens(url).to_table().to_pylist()
    assert row["token_extras"] == [array_row("x", values[1])]
    for per in ("episode", "token"):
        with pytest.raises(InvalidInputError, match=r"^extras\['x'\]: expected an extra with one"):
            analysis.tokens(url, extras={"x": "int16"}, per=per).to_table()


async def test_rows_of_tokens_read_only_their_extras(buffer: Buffer, url: str) -> None:
    """Not the large ones, which have parts of their own."""
    experts = np.ones((5, 40_000), np.uint8)
    await buffer.put(EpisodeGroup("math", [episode(token_extras={"experts": experts})]))
    async with transaction(url) as connection:
        await connection.execute(
            update(payload).where(payload.c.field == "experts").values(checksum=0)
        )
        await connection.commit()
    assert analysis.tokens(url, per="token").to_table().num_rows == 5
    with pytest.raises(CorruptPayloadError, match="checksum"):
        analysis.tokens(url).to_table()


@postgresql_nightly
async def test_extras_as_columns(buffer: Buffer, url: str) -> None:
    given = [
        Episode(prompt_ids=[1], response_ids=[2], extras={
            "state": torch.tensor([[1.5], [2.0]], dtype=torch.bfloat16), "n": np.int8(3)}),
        Episode(prompt_ids=[1], response_ids=[2]),
        Episode(prompt_ids=[1], response_ids=[2], token_extras={
            "state": np.array([1, 2], np.float16), "token_rewards": [0.0, 0.5]}),
    ]  # fmt: skip
    await buffer.put(EpisodeGroup("math", given))
    rows = analysis.tokens(url, extras={"state": "float32", "n": "int64", "never": "bool"})
    table = rows.to_table()
    assert table["state"].to_pylist() == [[1.5, 2.0], None, [1.0, 2.0]]
    assert table["n"].to_pylist() == [[3], None, None]
    assert table["never"].to_pylist() == [None] * 3
    assert table["token_rewards"].to_pylist() == [None, None, [0.0, 0.5]]
    assert rows.schema.field("state").type == pa.list_(pa.float32())
    with pytest.raises(InvalidInputError, match=r"extras\['state'\].*int64"):
        analysis.tokens(url, extras={"state": "int64"}).to_table()
    with pytest.raises(InvalidInputError, match="one number for each token"):
        analysis.tokens(url, extras={"n": "int64"}, per="token").to_table()


@postgresql_nightly
async def test_invalid_arguments(buffer: Buffer, url: str) -> None:
    for which in (
        {"per": "turn"}, {"damaged": "ignore"}, {"extras": {"token_ids": "int32"}},
        {"extras": {"x": "number"}}, {"extras": {"x": "object"}}, {"extras": ["x"]},
        {"extras": {"x": "datetime64[s]"}},
    ):  # fmt: skip
        with pytest.raises(InvalidInputError, match=next(iter(which))):
            analysis.tokens(url, **which)
    assert buffer.name == "math"


@postgresql_nightly
@pytest.mark.parametrize("layout", ["inside", "outside"])
async def test_damaged_payloads(buffer: Buffer, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "CHUNK_GROUPS", 2)
    ids = await buffer.put(groups(6))
    bad = [ids[1], ids[4]]
    async with transaction(url) as connection:
        await connection.execute(
            update(payload).where(payload.c.group_id.in_(bad)).values(checksum=0)
        )
        await connection.commit()
    with pytest.raises(CorruptPayloadError, match="checksum") as raised:
        analysis.tokens(url).to_table()
    assert raised.value.group_ids == (bad[0],)
    left = analysis.tokens(url, damaged="skip", where=rdb.col.id >= ids[0]).to_table()
    assert list(dict.fromkeys(left["group_id"].to_pylist())) == [
        one for one in ids if one not in bad
    ]


def large() -> list[EpisodeGroup]:
    """Return groups with all kinds of values, some of them large."""
    pixels = np.arange(800, dtype=np.uint8)
    return [
        *rich(),
        EpisodeGroup("math", [
            episode(float(i), text="é" * 300 * i, metadata={"note": "x" * 200 * (i % 3)},
                    extras={"pixels": pixels, **({"more": pixels[:i]} if i % 2 else {})},
                    token_extras={"ref": np.arange(5, dtype=np.float32) + i})
            for i in range(7)
        ], prompt="p" * 900, extras={"image": pixels}),
        EpisodeGroup("math", [conversation(), episode(1.0), conversation()], tags={"a": "b" * 500}),
        EpisodeGroup("math", [episode(0.0)], extras={"image": np.zeros(3000)}),
    ]  # fmt: skip


@postgresql_nightly
@pytest.mark.parametrize("compression", [None, "zstd"])
async def test_batches_are_cut_by_their_bytes(
    store: Store, url: str, monkeypatch: pytest.MonkeyPatch, compression: Any
) -> None:
    """Within groups too, also by the size of what each episode repeats of its group."""
    buffer = await store.buffer("math", compression=compression)
    await buffer.put(large())
    tables = [{"per": "episode", "extras": {"pixels": "uint8"}}, {"per": "token"}]
    whole = [analysis.tokens(url, **how).to_table() for how in tables]  # type: ignore[arg-type]
    monkeypatch.setattr(decoded_groups, "BATCH_BYTES", 20_000)
    for how, rows in zip(tables, whole, strict=True):
        found = analysis.tokens(url, **how).to_table()  # type: ignore[arg-type]
        assert str(found.to_pylist()) == str(rows.to_pylist())  # NaN differs from itself
    batches = list(analysis.tokens(url).reader())
    assert len(batches) > len(set(whole[0]["group_id"].to_pylist()))
    assert all(one.num_rows == 1 or one.nbytes < 20_000 for one in batches)
    assert max(one.num_rows for one in batches) > 1


def test_compressed_payloads_are_cut_by_their_decoded_bytes() -> None:
    """The size of a row is that of its values, whatever the stored size."""
    many = EpisodeGroup("t", [episode(extras={"zeros": np.zeros(1 << 20)})] * 9)
    found = list(in_batches([decoded_group(many), decoded_group(many)]))
    assert [sum(len(one.rows) for one in several) for several in found] == [7, 2, 7, 2]


@pytest.mark.parametrize(
    ("field", "one"),
    [
        ("text", episode(text="é" * 1500)),
        ("metadata", episode(metadata={"note": "x" * 3000})),
        ("extras", episode(extras={"a": np.zeros(200), "b": np.zeros(200)})),
        ("token_extras", episode(token_extras={"a": np.zeros((5, 75))})),
        ("turns", Episode(turns=[Turn(prompt_ids=[1], response_ids=[2],
                                      metadata={"x": "y" * 3000})])),
        ("prompt", None),
        ("group_extras", None),
    ],
)  # fmt: skip
async def test_a_value_that_no_column_can_have(
    buffer: Buffer, url: str, monkeypatch: pytest.MonkeyPatch, field: str, one: Episode | None
) -> None:
    monkeypatch.setattr(decoded_groups, "BATCH_BYTES", 1000)
    monkeypatch.setattr(decoded_groups, "MAX_COLUMN_BYTES", 2900)
    context: dict[str, Any] = {"prompt": "x" * 3000} if field == "prompt" else {}
    if field == "group_extras":
        context = {"extras": {"image": np.zeros(400)}}
    last = episode() if one is None else one
    _, group_id = await buffer.put([group(), EpisodeGroup("t", [episode(), last], **context)])
    for damaged in ("raise", "skip"):
        rows = analysis.tokens(url, damaged=damaged)
        position = 0 if one is None else 1
        with pytest.raises(
            NotSupportedError, match=f"group {group_id}, episode {position}: {field} has 3[0-9]+ "
        ):
            rows.to_table()


@postgresql_nightly
async def test_memory_holds_one_chunk(
    buffer: Buffer, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks are limited by number and size of groups, and read one at a time."""
    monkeypatch.setattr(reading, "CHUNK_GROUPS", 4)
    await buffer.put([*groups(9), *(long_group(f"long-{i}", 200_000) for i in range(3))])
    counts = [len(set(batch["group_id"].to_pylist())) for batch in analysis.tokens(url).reader()]
    assert counts == [4, 4, 2, 1, 1]
    alive = pa.total_allocated_bytes()
    for batch in analysis.tokens(url, per="token").reader():
        assert batch.num_rows <= 200_000 + 10
        del batch
    assert pa.total_allocated_bytes() - alive < 1 << 20
