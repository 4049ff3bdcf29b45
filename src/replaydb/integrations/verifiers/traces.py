"""Conversion of traces to episodes whose turns are the nodes, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import replaydb as rdb
from replaydb.integrations.values import Arrays, completed, decode, encode, to_reward, without
from replaydb.integrations.verifiers.nodes import Node, to_fields, to_turn

#: The key of the metadata with all that no column has.
_KEY = "verifiers"


def from_trace(trace: Any, *, policy_version: int | None = None) -> rdb.Episode:
    """Convert a trace to an episode with one turn for each node.

    Args:
        trace: A `Trace`, or its record as a mapping: `Trace.model_dump()`, what the environment
            server sends, or a line of `traces.jsonl`. A `Trace` is stored with the fields that
            verifiers leaves out of records, such as `state`.
        policy_version: The policy version that acted, which a trace does not have.

    Raises:
        InvalidInputError: A field cannot be stored, or does not fit the tokens of its node.
    """
    record = _record(trace)
    nodes = record.get("nodes")
    if not (isinstance(nodes, list) and all(isinstance(node, Mapping) for node in nodes)):
        raise rdb.InvalidInputError("trace.nodes", "a list of nodes", type(nodes).__name__)
    turns: list[rdb.Turn] = []
    kinds: dict[str, Any] = {}
    for i, (node, marks) in enumerate(zip(nodes, _marks(record, nodes), strict=True)):
        parent = None if node.get("parent") is None else turns[node["parent"]]
        turns.append(to_turn(f"trace.nodes[{i}]", node, parent, kinds, marks))
    arrays: Arrays = {}
    stored = {
        "trace": encode("trace", {**record, "nodes": None}, arrays),
        "nodes": [
            without(f"trace.nodes[{i}]", node, to_fields(turn), arrays)
            for i, (node, turn) in enumerate(zip(nodes, turns, strict=True))
        ],
    }
    tokens: dict[str, Any] = {"turns": turns} if turns else {"prompt_ids": [], "response_ids": []}
    return rdb.Episode(
        **tokens,
        reward=_reward(record.get("rewards")),
        policy_version=policy_version,
        metadata={_KEY: stored},
        extras=arrays,
    )


def to_trace(episode: rdb.Episode, kind: Any = None) -> Any:
    """Convert an episode of `from_trace` back to its record, a dict.

    Args:
        episode: The episode.
        kind: A class, such as `WireTrace`, to validate the record and return an instance of it.

    Raises:
        InvalidInputError: The episode is none of `from_trace`.
    """
    if _KEY not in episode.metadata:
        raise rdb.InvalidInputError("episode", "an episode of from_trace", repr(episode))
    stored, arrays = episode.metadata[_KEY], episode.extras
    record: dict[str, Any] = decode(stored["trace"], arrays)
    record["nodes"] = [
        completed(node, to_fields(turn), arrays)
        for node, turn in zip(stored["nodes"], episode.turns, strict=True)
    ]
    return record if kind is None else kind.model_validate(record)


def _record(trace: Any) -> dict[str, Any]:
    """Return the record of a trace, or of a part of it, with all of its fields."""
    if isinstance(trace, Mapping):
        return dict(trace)
    if not hasattr(trace, "model_fields_set"):
        raise rdb.InvalidInputError("trace", "a Trace or its record", type(trace).__name__)
    record: dict[str, Any] = trace.model_dump(serialize_as_any=True)
    for name, field in type(trace).model_fields.items():
        value = getattr(trace, name)
        if name == "nodes":
            record[name] = [_record(node) for node in value]
        elif field.exclude:
            record[name] = _record(value) if hasattr(value, "model_fields_set") else value
    return record


def _marks(record: Mapping[str, Any], nodes: Sequence[Node]) -> list[dict[str, Any]]:
    """Return uid, agent and finish reason of the turn of each node, and whether it is discarded."""
    for i, node in enumerate(nodes):
        parent = node.get("parent")
        if parent is not None and (type(parent) is not int or parent not in range(i)):
            expected = "None, or the index of an earlier node"
            raise rdb.InvalidInputError(f"trace.nodes[{i}].parent", expected, repr(parent))
    if not isinstance(uid := record.get("id"), str):
        raise rdb.InvalidInputError("trace.id", "a str", repr(uid))
    agent = record["agent"] if isinstance(record.get("agent"), Mapping) else {}
    trained = set() if agent.get("trainable") is False else _trained(nodes)
    calls = _mappings(record.get("calls"))
    reasons = {str(call.get("node")): call.get("finish_reason") for call in calls}
    return [
        {
            "uid": f"{uid}/{i}",
            "agent": agent.get("name") if node.get("sampled") else None,
            "finish_reason": reasons.get(str(i)),
            "is_discarded": i not in trained,
        }
        for i, node in enumerate(nodes)
    ]


def _trained(nodes: Sequence[Node]) -> set[int]:
    """Return the nodes of the branches that verifiers trains on.

    These are all but those that end in an attempt of a compaction that was not used.
    """
    links = [
        [(link.get("type"), link.get("node")) for link in _mappings(node.get("semantic_parents"))]
        for node in nodes
    ]
    used = {at for several in links for kind, at in several if kind == "compaction"}
    inner = {node.get("parent") for node in nodes}
    found: set[int] = set()
    for leaf, several in enumerate(links):
        is_attempt = any(kind == "compaction_attempt" for kind, _ in several)
        at = None if leaf in inner or (is_attempt and leaf not in used) else leaf
        while at is not None and at not in found:
            found.add(at)
            at = nodes[at].get("parent")
    return found


def _mappings(values: Any) -> list[Mapping[str, Any]]:
    return [one for one in values if isinstance(one, Mapping)] if isinstance(values, list) else []


def _reward(rewards: Any) -> float | None:
    """Return the weighted sum of the rewards that are known; None if none is."""
    try:
        known = [one for one in (rewards or {}).values() if one is not None]
        return to_reward(sum(one["score"] * one["weight"] for one in known)) if known else None
    except (AttributeError, LookupError, TypeError) as error:
        expected = "None, or score and weight, by name"
        raise rdb.InvalidInputError("trace.rewards", expected, repr(rewards)) from error
