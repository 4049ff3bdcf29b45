"""What answers are read with: their fields by name, and what is wrong said by its name."""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

from replaydb import InvalidInputError

#: What vLLM's HTTP server writes for logprobs that it does not have, or that are lower.
_VLLM_FLOOR = -9999.0

#: How far above 0 a logprob may be, of probabilities that are rounded.
_ROUNDING = 0.01


def parsed(response: Any) -> Any:
    """An answer, of its JSON where that is text or bytes."""
    if not isinstance(response, str | bytes):
        return response
    try:
        return json.loads(response)
    except ValueError as error:
        raise InvalidInputError("response", "an answer, or its JSON", str(error)) from None


def get(holder: Any, name: str) -> Any:
    """A field of an object or of JSON; None where there is none."""
    return holder.get(name) if isinstance(holder, Mapping) else getattr(holder, name, None)


def first(*values: Any) -> Any:
    """The first that is not None, or None."""
    return next((value for value in values if value is not None), None)


def in_order(name: str, several: Any) -> list[tuple[str, Any]]:
    """Completions by their index, each with where it stood."""
    if not isinstance(several, Sequence) or isinstance(several, str):
        raise InvalidInputError(name, "a list of completions", repr(several))
    placed = [(f"{name}[{i}]", one) for i, one in enumerate(several)]
    for where, one in placed:
        if not isinstance(get(one, "index"), int | None):
            raise InvalidInputError(f"{where}.index", "an integer", repr(get(one, "index")))
    return sorted(placed, key=lambda each: get(each[1], "index") or 0)


def token_ids(where: str, value: Any, expected: str) -> list[int]:
    """Token ids, or an error that says what gives them."""
    if value is None:
        raise InvalidInputError(where, f"token ids: {expected}", "none")
    try:
        return [operator.index(one) for one in value]
    except TypeError:
        raise InvalidInputError(where, "a list of token ids", repr(value)) from None


def as_many(where: str, ids: Sequence[int], counted: Any) -> None:
    """Refuse more or fewer tokens than the engine says it sampled."""
    if counted is not None and counted != len(ids):
        raise InvalidInputError(where, f"the {counted} tokens that were sampled", len(ids))


def finished(where: str, reason: Any, expected: str) -> str:
    """Why a completion ended, or an error that says when it will have."""
    kind = get(reason, "type") if isinstance(reason, Mapping) else reason  # SGLang says more
    if kind is None:
        raise InvalidInputError(where, expected, "None")
    return str(kind)


def aligned(where: str, values: Any, ids: Sequence[int], expected: str) -> Sequence[Any]:
    """As many values as there are tokens; none are needed for no token."""
    if values is None and ids:
        raise InvalidInputError(where, f"logprobs: {expected}", "none")
    found = [] if values is None else values
    if not isinstance(found, Sequence):
        raise InvalidInputError(where, "a list", repr(values))
    if len(found) != len(ids):
        raise InvalidInputError(where, f"one for each of {len(ids)} tokens", len(found))
    return found


def floats(where: str, logprobs: Iterable[Any]) -> list[float]:
    """Logprobs, NaN where there is none."""
    found = []
    for i, one in enumerate(logprobs):
        if one is not None and (not isinstance(one, Real) or float(one) > _ROUNDING):
            raise InvalidInputError(f"{where}[{i}]", "a logprob, at most 0", repr(one))
        found.append(math.nan if one is None or one <= _VLLM_FLOOR else float(one))
    return found


def version(reported: Any) -> int | None:
    """The version a server reports, where it is a number; SGLang's is text, "default" at first."""
    text = str(reported)
    if not text.isascii() or not text.isdigit():
        return None
    if len(text) > 10:
        raise InvalidInputError("weight_version", "a number of 32 bits", f"{len(text)} digits")
    return int(text)


def said(**facts: Any) -> dict[str, Any]:
    """Facts without those that there is nothing to say about."""
    return {name: fact for name, fact in facts.items() if fact not in (None, "", [])}
