"""Conversion of a node of a trace to the columns of a turn, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

import replaydb as rdb
from replaydb.domain.episodes.arrays import to_bool, to_float32, to_int32
from replaydb.domain.episodes.turns import with_own_extras
from replaydb.integrations.values import uniform
from replaydb.util.escapes import escape

Node = Mapping[str, Any]
#: Fields with a number for each sampled token.
_SAMPLED = ("advantages", "reference_logprobs", "trainer_logprobs", "entropies")
#: Fields with some token ids for each sampled token: that of 0.4.0, and that of its repository.
_MASKS = ("sampling_mask", "kept_tokens")
_CONTENT = "is_content"
_EXPERTS = "routed_experts"
#: A field with streams of numbers for each token, by name.
_WEIGHTS = "loss_weights"


def to_turn(
    where: str, node: Node, parent: rdb.Turn | None, kinds: dict[str, Any], marks: Node
) -> rdb.Turn:
    """Convert a node. Its response begins with its first sampled token.

    Fields whose lengths are not those of the tokens become no token extras.

    Args:
        where: Path to the node, for errors.
        node: The record of the node.
        parent: The turn of its parent.
        kinds: Dtype and shape of each token extra so far. Others become no token extras either.
        marks: Fields of the turn that are none of the node.

    Raises:
        InvalidInputError: Token ids, mask or logprobs are invalid, or not of one length.
    """
    tokens = to_int32(f"{where}.token_ids", node.get("token_ids", ()))
    mask = to_bool(f"{where}.mask", node.get("mask", ()))
    if len(mask) not in (0, len(tokens)):
        raise rdb.InvalidInputError(f"{where}.mask", f"{len(tokens)} bools", len(mask))
    mask = mask if len(mask) else np.zeros(len(tokens), np.bool_)
    start = int(mask.argmax()) if mask.any() else len(mask)
    sampled = mask[start:]
    context: dict[str, Any] = {"prompt_ids" if parent is None else "new_ids": tokens[:start]}
    try:
        turn = rdb.Turn(
            parent=parent,
            **context,
            response_ids=tokens[start:],
            loss_mask=sampled,
            logprobs=_logprobs(node.get("logprobs"), sampled),
            token_extras=uniform(_of_sampled(node, sampled), kinds),
            **marks,
        )
        return with_own_extras(turn, uniform(_of_all(node, len(mask)), kinds))
    except rdb.InvalidInputError as error:
        field = f"{where}.{error.field}"
        raise rdb.InvalidInputError(field, error.expected, error.actual) from error


def to_fields(turn: rdb.Turn) -> dict[str, Any]:
    """Return the fields of a node that the columns of its turn have."""
    before = 0 if turn.parent is None else turn.parent.num_tokens
    context, sampled = turn.prompt_ids[before:], turn.loss_mask
    start = len(context)
    fields: dict[str, Any] = {
        "token_ids": context.tolist() + turn.response_ids.tolist(),
        "mask": [False] * len(context) + sampled.tolist(),
        "logprobs": [] if turn.logprobs is None else turn.logprobs[sampled].tolist(),
    }
    extras: dict[str, Any] = turn.segment.extras(before)
    for name, values in extras.items():
        if name in _SAMPLED:
            fields[name] = values[start:][sampled].tolist()
        elif name in _MASKS:
            counts = values[start:].counts[sampled].astype(np.int32)
            fields[name] = {"ids": _sent(values.values), "counts": _sent(counts)}
        elif name == _EXPERTS:
            fields[name] = _sent(values)
        elif name == _CONTENT:
            fields[name] = values.tolist()
        else:
            stream = name.removeprefix(f"{_WEIGHTS}/")
            fields.setdefault(_WEIGHTS, {})[stream] = values.tolist()
    return fields


def _logprobs(given: Any, sampled: NDArray[np.bool_]) -> NDArray[np.float32] | None:
    """Return logprobs of a response [R], NaN for tokens that were not sampled; None for none."""
    numbers = to_float32("logprobs", () if given is None else given)
    if not len(numbers):
        return None
    if len(numbers) != sampled.sum():
        expected = f"{sampled.sum()} numbers, one for each True of the mask"
        raise rdb.InvalidInputError("logprobs", expected, len(numbers))
    found = np.full(len(sampled), np.nan, np.float32)
    found[sampled] = numbers
    return found


def _of_sampled(node: Node, sampled: NDArray[np.bool_]) -> dict[str, Any]:
    """Return the token extras of a response [R, ...] with values for sampled tokens."""
    found: dict[str, Any] = {}
    for name in _SAMPLED:
        if _is_list(values := node.get(name), float, sampled.sum()):
            found[name] = np.zeros(len(sampled))
            found[name][sampled] = values
    for name in _MASKS:
        if (mask := _ragged(node.get(name), sampled)) is not None:
            found[name] = mask
    return found


def _of_all(node: Node, size: int) -> dict[str, Any]:
    """Return the token extras with values for all tokens of a node [size, ...]."""
    found: dict[str, Any] = {}
    if _is_list(content := node.get(_CONTENT), bool, size):
        found[_CONTENT] = np.array(content)
    experts = _received(node.get(_EXPERTS))
    if experts is not None and experts.ndim and len(experts) == size > 0:
        found[_EXPERTS] = experts
    streams = node.get(_WEIGHTS)
    for name, weights in streams.items() if isinstance(streams, Mapping) else ():
        is_name = isinstance(name, str) and escape(name) == name and len(name) < 200
        if is_name and _is_list(weights, float, size):
            found[f"{_WEIGHTS}/{name}"] = np.array(weights)
    return found


def _is_list(values: Any, kind: type, size: int) -> bool:
    """Whether a value is a list of a positive number of values of one type."""
    return isinstance(values, list) and len(values) == size > 0 and {*map(type, values)} == {kind}


def _ragged(value: Any, sampled: NDArray[np.bool_]) -> rdb.Ragged | None:
    """Return ids and counts of sampled tokens as those of a response [R]."""
    ids, counts = (
        _received(value.get(part) if isinstance(value, Mapping) else None)
        for part in ("ids", "counts")
    )
    if ids is None or counts is None or ids.ndim != 1 or counts.shape != (sampled.sum(),):
        return None
    spread = np.zeros(len(sampled), np.int64)
    spread[sampled] = counts
    is_exact = len(sampled) and counts.dtype.kind == "i" and counts.min() >= 0
    return rdb.Ragged(ids, spread) if is_exact and counts.sum() == len(ids) else None


def _received(value: Any) -> NDArray[Any] | None:
    """Return the array that verifiers sent as its dtype, shape and bytes; None for others."""
    try:
        array = np.frombuffer(value["data"], value["dtype"]).reshape(value["shape"])
    except (LookupError, TypeError, ValueError):
        return None
    return array if array.dtype.kind in "biuf" else None


def _sent(array: NDArray[Any]) -> dict[str, Any]:
    """Return an array as verifiers sends it."""
    return {
        "__nd__": True,
        "dtype": str(array.dtype),
        "shape": list(array.shape),
        "data": array.tobytes(),
    }
