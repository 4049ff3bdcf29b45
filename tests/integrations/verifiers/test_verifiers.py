"""Conversion of verifiers' traces to episodes and back, without loss."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from pydantic import BaseModel

import replaydb as rdb
from integrations.identical import identical
from integrations.verifiers.records import records, sent
from integrations.verifiers.upstream import WireTrace
from replaydb.integrations.verifiers import from_trace, to_trace
from replaydb.training import merge_turns
from support.engines import both_engines
from support.examples import examples


def node(parent: int | None, ids: list[Any], sampled: int = 0, **fields: Any) -> dict[str, Any]:
    """A node that ends with some sampled tokens."""
    mask = [i >= len(ids) - sampled for i in range(len(ids))]
    message = {"role": "assistant" if sampled else "user", "content": "hi"}
    return {
        "parent": parent,
        "message": message,
        "sampled": sampled > 0,
        "token_ids": ids,
        "mask": mask,
        "logprobs": [-0.5] * sampled,
    } | fields


def trace(*nodes: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """The record of a trace."""
    return {
        "id": "a1",
        "verifiers": {"version": "0.4.0", "commit": None},
        "task": {"type": "T", "data": {"idx": 0}},
        "agent": {"config": {}, "name": "solver", "trainable": True},
        "nodes": list(nodes),
        "rewards": {"right": {"score": 1.0, "weight": 0.75}, "format": None},
        "timing": {"start": 1.5},
    } | fields


def ordered(value: Any) -> Any:
    """Return a record with its fields, and those of its nodes, in alphabetical order."""
    if "nodes" in value:
        value = value | {"nodes": [ordered(one) for one in value["nodes"]]}
    return {name: value[name] for name in sorted(value)}


@settings(deadline=None)
@given(records())
def test_records_round_trip(record: dict[str, Any]) -> None:
    assert identical(ordered(to_trace(from_trace(record))), ordered(record))


@settings(deadline=None, max_examples=examples(50))
@given(records())
def test_instances_round_trip(record: dict[str, Any]) -> None:
    one = WireTrace.model_validate(record)
    found = to_trace(from_trace(one), WireTrace)
    assert identical(found, one)
    assert identical(found.model_dump(), one.model_dump())


@both_engines
async def test_stored_records_round_trip(url: str) -> None:
    several: list[dict[str, Any]] = []

    @settings(deadline=None, database=None, max_examples=examples(60))
    @given(records())
    def collect(record: dict[str, Any]) -> None:
        several.append(record | {"id": f"trace-{len(several)}"})

    collect()
    async with rdb.Store.open(url, run="test") as store:
        buffer = await store.buffer("verifiers")
        halves = [several[::2], several[1::2]]
        groups = [rdb.EpisodeGroup("env", map(from_trace, half)) for half in halves if half]
        for group, half in zip(await buffer.get(await buffer.put(groups)), halves, strict=False):
            for episode, record in zip(group.episodes, half, strict=True):
                assert identical(ordered(to_trace(episode)), ordered(record))


class Data(BaseModel):
    idx: int = 0


class RowData(Data):
    answer: str = "4"


class TraceWithData(WireTrace):
    data: Data


def test_fields_of_subclasses_are_stored() -> None:
    """An annotation names the base class, for example of the data of all tasks."""
    one = TraceWithData.model_validate(trace(data=RowData()))
    assert to_trace(from_trace(one))["data"] == {"idx": 0, "answer": "4"}


def test_nodes_become_turns() -> None:
    calls = [{"node": 1, "finish_reason": "stop"}, {"node": None, "finish_reason": None}]
    record = trace(
        node(None, [1, 2]), node(0, [3, 4, 5], 2), node(1, [6]), node(0, [7], 1), calls=calls
    )
    episode = from_trace(record, policy_version=4)
    turns = episode.turns
    assert [turn.uid for turn in turns] == ["a1/0", "a1/1", "a1/2", "a1/3"]
    assert [turn.parent for turn in turns] == [None, turns[0], turns[1], turns[0]]
    assert [turn.agent for turn in turns] == [None, "solver", None, "solver"]
    assert [turn.finish_reason for turn in turns] == [None, "stop", None, None]
    assert turns[1].prompt_ids.tolist() == [1, 2, 3]
    assert turns[1].response_ids.tolist() == [4, 5]
    assert (episode.reward, episode.min_policy_version) == (0.75, 4)
    rows = [row.episode for row in merge_turns(episode, interleaved=True)[0]]
    assert [row.token_ids.tolist() for row in rows] == [[1, 2, 3, 4, 5, 6], [1, 2, 7]]
    assert [row.num_loss_tokens for row in rows] == [2, 1]
    stored = episode.metadata["verifiers"]["nodes"]
    assert [set(one["fields"]) for one in stored] == [{"message", "sampled", "parent"}] * 4


def test_values_of_tokens_become_token_extras() -> None:
    experts = np.arange(20, dtype=np.uint8).reshape(5, 2, 2)
    ids, counts = np.array([8, 9, 10], np.int32), np.array([2, 1], np.int32)
    record = trace(
        node(None, [1, 2], is_content=[False, True], routed_experts=sent(experts[:2])),
        node(
            0,
            [3, 4, 5],
            is_content=[False, True, True],
            routed_experts=sent(experts[2:]),
            mask=[False, True, True],
            logprobs=[-0.5, -0.25],
            advantages=[0.1, 0.2],
            loss_weights={"ce": [1.0, 0.5, 0.0]},
            sampling_mask={"ids": sent(ids), "counts": sent(counts)},
        ),
    )
    episode = from_trace(record)
    extras = episode.turns[1].token_extras
    assert extras["routed_experts"].tolist() == experts.tolist()
    assert extras["is_content"].tolist() == [False, True, False, True, True]
    assert extras["advantages"].tolist() == [0, 0, 0, 0.1, 0.2]
    assert extras["loss_weights/ce"].tolist() == [0, 0, 1, 0.5, 0]
    assert extras["sampling_mask"].tolist() == [[], [], [], [8, 9], [10]]
    assert episode.extras == {}
    assert identical(ordered(to_trace(episode)), ordered(record))


def test_tokens_between_sampled_ones_have_no_logprob() -> None:
    one = node(None, [1, 2, 3, 4], mask=[False, True, False, True], logprobs=[-0.5, -0.25])
    episode = from_trace(trace(one))
    assert "logprobs" in episode.metadata["verifiers"]["nodes"][0]["usual"]
    [turn] = episode.turns
    assert turn.loss_mask.tolist() == [True, False, True]
    assert turn.logprobs is not None
    assert np.array_equal(turn.logprobs, [-0.5, np.nan, -0.25], equal_nan=True)


def test_agents_that_are_not_trainable_are_discarded() -> None:
    frozen = {"config": {}, "name": "user", "trainable": False}
    episode = from_trace(trace(node(None, [1]), node(0, [2], 1), agent=frozen))
    assert [turn.is_discarded for turn in episode.turns] == [True, True]
    assert episode.num_loss_tokens == 0


@pytest.mark.parametrize("is_used", [False, True])
def test_compactions_that_were_not_used_are_discarded(is_used: bool) -> None:
    attempt = [{"type": "compaction_attempt", "node": 1}]
    used = [{"type": "compaction", "node": 3}] if is_used else []
    episode = from_trace(
        trace(
            node(None, [1]),
            node(0, [2], 1),
            node(0, [3]),
            node(2, [4], 1, semantic_parents=attempt),
            node(None, [5], 1, semantic_parents=used),
        )
    )
    # The branch is that of nodes 0, 2 and 3. The first one is also in another branch.
    discarded = [turn.is_discarded for turn in episode.turns]
    assert discarded == [False, False, not is_used, not is_used, False]


@pytest.mark.parametrize("rewards", [{}, None, {"a": None}, {"a": {"score": 1e300, "weight": 1}}])
def test_a_reward_that_is_unknown(rewards: Any) -> None:
    record = trace(rewards=rewards)
    assert from_trace(record).reward is None
    assert identical(ordered(to_trace(from_trace(record))), ordered(record))


def test_unknown_and_missing_fields() -> None:
    one = node(None, [1, 2], 1, thoughts=[1, 1.0, True, -0.0], pixels=np.arange(3))
    del one["logprobs"]
    record = trace(one, {"token_ids": [3]}, {}, later={"a": b"\xff"})
    assert identical(ordered(to_trace(from_trace(record))), ordered(record))


@pytest.mark.parametrize(
    ("record", "field"),
    [
        ("text", "trace"),
        ({"id": "a"}, "trace.nodes"),
        (trace(3), "trace.nodes"),  # type: ignore[arg-type]
        (trace(id=3), "trace.id"),
        (trace(rewards=[1.0]), "trace.rewards"),
        (trace(rewards={"a": {"score": "1"}}), "trace.rewards"),
        (trace(node(0, [1])), "trace.nodes[0].parent"),
        (trace(node(None, [1]), node(-1, [1])), "trace.nodes[1].parent"),
        (trace(node(None, [1]), node(False, [1])), "trace.nodes[1].parent"),
        (trace(node(None, [1.5])), "trace.nodes[0].token_ids"),
        (trace(node(None, [2**31])), "trace.nodes[0].token_ids"),
        (trace(node(None, [1], mask=[True, True])), "trace.nodes[0].mask"),
        (trace(node(None, [1], mask=[2])), "trace.nodes[0].mask"),
        (trace(node(None, [1], 1, logprobs=[-1.0] * 2)), "trace.nodes[0].logprobs"),
        (trace(node(None, [1], 1, logprobs=[math.inf])), "trace.nodes[0].logprobs"),
        (trace(node(None, [1], 1, logprobs=["a"])), "trace.nodes[0].logprobs"),
        (trace(node(None, [1], message=object())), "trace.nodes[0].message"),
        (trace(info={"a": [object()]}), "trace.info.a[0]"),
    ],
)
def test_invalid_traces(record: Any, field: str) -> None:
    with pytest.raises(rdb.InvalidInputError) as caught:
        from_trace(record)
    assert caught.value.field == field


def test_other_episodes_are_refused() -> None:
    with pytest.raises(rdb.InvalidInputError, match="from_trace"):
        to_trace(rdb.Episode(prompt_ids=[1], response_ids=[2]))
