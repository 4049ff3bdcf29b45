"""Reading and validation of response fields, with errors that name the field."""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

from replaydb import InvalidInputError

#: The value that vLLM's HTTP server writes for logprobs that are missing or lower.
_VLLM_FLOOR = -9999.0

#: How far above 0 a logprob may be because probabilities are rounded.
_ROUNDING = 0.01


def parsed(response: Any) -> Any:
    """Return a response, parsed if it is JSON text or bytes."""
    if not isinstance(response, str | bytes):
        return response
    try:
        return json.loads(response)
    except ValueError as error:
        raise InvalidInputError("response", "a response, or its JSON", str(error)) from None


def get(holder: Any, name: str) -> Any:
    """Return a field of an object or of JSON; None if it is missing."""
    return holder.get(name) if isinstance(holder, Mapping) else getattr(holder, name, None)


def first(*values: Any) -> Any:
    """Return the first value that is not None, or None."""
    return next((value for value in values if value is not None), None)


def in_order(name: str, several: Any) -> list[tuple[str, Any]]:
    """Return completions sorted by their index, each with its path in the response."""
    if not isinstance(several, Sequence) or isinstance(several, str):
        raise InvalidInputError(name, "a list of completions", repr(several))
    placed = [(f"{name}[{i}]", one) for i, one in enumerate(several)]
    for where, one in placed:
        if not isinstance(get(one, "index"), int | None):
            raise InvalidInputError(f"{where}.index", "an integer", repr(get(one, "index")))
    return sorted(placed, key=lambda each: get(each[1], "index") or 0)


def token_ids(where: str, value: Any, expected: str) -> list[int]:
    """Return token ids. `expected` names the option that returns them, for the error."""
    if value is None:
        raise InvalidInputError(where, f"token ids: {expected}", "none")
    try:
        return [operator.index(one) for one in value]
    except TypeError:
        raise InvalidInputError(where, "a list of token ids", repr(value)) from None


def check_count(where: str, ids: Sequence[int], counted: Any) -> None:
    """Refuse another number of tokens than the engine reports as sampled."""
    if counted is not None and counted != len(ids):
        raise InvalidInputError(where, f"the {counted} tokens that were sampled", len(ids))


def finished(where: str, reason: Any, expected: str) -> str:
    """Return why a completion ended; `expected` is for the error if it has not ended."""
    kind = get(reason, "type") if isinstance(reason, Mapping) else reason  # SGLang's is an object
    if kind is None:
        raise InvalidInputError(where, expected, "None")
    return str(kind)


def aligned(where: str, values: Any, ids: Sequence[int], expected: str) -> Sequence[Any]:
    """Return one value per token. Without tokens, `values` can be None."""
    if values is None and ids:
        raise InvalidInputError(where, f"logprobs: {expected}", "none")
    found = [] if values is None else values
    if not isinstance(found, Sequence):
        raise InvalidInputError(where, "a list", repr(values))
    if len(found) != len(ids):
        raise InvalidInputError(where, f"one for each of {len(ids)} tokens", len(found))
    return found


def floats(where: str, logprobs: Iterable[Any]) -> list[float]:
    """Return logprobs as floats; missing ones are NaN."""
    found = []
    for i, one in enumerate(logprobs):
        if one is not None and (not isinstance(one, Real) or float(one) > _ROUNDING):
            raise InvalidInputError(f"{where}[{i}]", "a logprob, at most 0", repr(one))
        found.append(math.nan if one is None or one <= _VLLM_FLOOR else float(one))
    return found


def versions(where: str, holder: Any, count: int) -> int | list[int] | None:
    """Return the policy version of `count` tokens, or one per token; None if one is unknown.

    SGLang and vLLM report spans: which version sampled the tokens from `start` to before `end`.
    SGLang's `weight_version` is the version of the last token.
    """
    spans = get(holder, "weight_versions") or ()
    if not isinstance(spans, Sequence):
        raise InvalidInputError(f"{where}weight_versions", "a list of spans", repr(spans))
    found: list[int | None] = [None] * count
    reached = 0
    for i, span in enumerate(spans):
        start, end = get(span, "start"), get(span, "end")
        if not (
            isinstance(start, int) and isinstance(end, int) and reached <= start <= end <= count
        ):
            expected = f"a span of the tokens from {reached} to {count}"
            raise InvalidInputError(f"{where}weight_versions[{i}]", expected, repr(span))
        found[start:end] = [_number(get(span, "version"))] * (end - start)
        reached = end
    if not spans or not count:
        return _number(get(holder, "weight_version"))
    known = [one for one in found if one is not None]
    if len(known) < count:
        return None
    return known if len(set(known)) > 1 else known[0]


def _number(reported: Any) -> int | None:
    """Return a reported version if it is a number. It is text, initially "default"."""
    text = str(reported)
    if not text.isascii() or not text.isdigit():
        return None
    if len(text) > 10:
        raise InvalidInputError("weight_version", "a number of 32 bits", f"{len(text)} digits")
    return int(text)


def non_empty(**values: Any) -> dict[str, Any]:
    """Return the values that are not None, "" or []."""
    return {name: value for name, value in values.items() if value not in (None, "", [])}
