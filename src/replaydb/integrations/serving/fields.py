"""What answers are read with: their fields by name, and what is wrong said by its name."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from replaydb import InvalidInputError

#: What vLLM's HTTP server writes for logprobs that it does not have, or that are lower.
_VLLM_FLOOR = -9999.0


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
    return sorted(placed, key=lambda each: get(each[1], "index") or 0)


def token_ids(where: str, value: Any, expected: str) -> list[int]:
    """Token ids, or an error that says what gives them."""
    if value is None:
        raise InvalidInputError(where, f"token ids: {expected}", "none")
    return list(value)


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
    found = values or []
    if len(found) != len(ids):
        raise InvalidInputError(where, f"one for each of {len(ids)} tokens", len(found))
    return found


def floats(logprobs: Iterable[float | None]) -> list[float]:
    """Logprobs, NaN where there is none."""
    return [math.nan if one is None or one <= _VLLM_FLOOR else float(one) for one in logprobs]


def version(reported: Any) -> int | None:
    """The version a server reports, where it is a number; SGLang's is text, "default" at first."""
    text = str(reported)
    return int(text) if text.isascii() and text.isdigit() else None


def said(**facts: Any) -> dict[str, Any]:
    """Facts without those that there is nothing to say about."""
    return {name: fact for name, fact in facts.items() if fact not in (None, "", [])}
