"""Responses of SGLang's own API."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from replaydb import InvalidInputError
from replaydb.integrations.serving.completion import Completion
from replaydb.integrations.serving.fields import (
    check_count,
    finished,
    floats,
    get,
    non_empty,
    parsed,
    token_ids,
    versions,
)

_LOGPROBS = "request them with return_logprob=True (in OpenAI's API: logprobs=True)"
_FINAL = "a finish reason: only the last response of a stream has it"


def from_sglang(response: Any, *, prompt_ids: Iterable[int] | None = None) -> list[Completion]:
    """Convert a response of `/generate` or `Engine.generate` to completions.

    Args:
        response: One response, or a list of them (n > 1), as objects or JSON.
        prompt_ids: The tokens that were sent as `input_ids`. By default they are read from
            `input_token_logprobs`, which needs `return_logprob` and `logprob_start_len=0`.

    Raises:
        InvalidInputError: Tokens or logprobs are missing, their number differs from
            `completion_tokens`, or the response is not finished.
    """
    response = parsed(response)
    one_alone = isinstance(response, Mapping)
    if not one_alone and not isinstance(response, Sequence):
        raise InvalidInputError("response", "a response, or a list of them", repr(response))
    several = [response] if one_alone else list(response)
    given = None if prompt_ids is None else list(prompt_ids)
    found = []
    for i, one in enumerate(several):
        where = "" if one_alone else f"[{i}]."
        meta = get(one, "meta_info") or {}
        ids, logprobs = sampled(f"{where}meta_info", meta, get(one, "output_ids"))
        reason = get(meta, "finish_reason")
        found.append(
            Completion(
                _prompt(f"{where}meta_info", meta) if given is None else given,
                ids,
                logprobs,
                get(one, "text"),
                finished(f"{where}meta_info.finish_reason", reason, _FINAL),
                versions(f"{where}meta_info.", meta, len(ids)),
                metadata=non_empty(request_id=get(meta, "id"), stop_reason=get(reason, "matched")),
            )
        )
    return found


def sampled(where: str, meta: Any, output_ids: Any) -> tuple[list[int], list[float]]:
    """Return tokens and logprobs of SGLang's `meta_info`: (logprob, token id, text) per token."""
    steps = get(meta, "output_token_logprobs")
    if steps is None and get(meta, "completion_tokens") != 0:
        expected = f"tokens and logprobs: {_LOGPROBS}"
        raise InvalidInputError(f"{where}.output_token_logprobs", expected, "none")
    where = f"{where}.output_token_logprobs"
    ids, logprobs = _steps(where, steps or [])
    if output_ids is not None and token_ids("output_ids", output_ids, "") != ids:
        raise InvalidInputError(
            where,
            f"logprobs of the {len(output_ids)} output tokens",
            f"logprobs of {len(ids)} other tokens",
        )
    check_count(where, ids, get(meta, "completion_tokens"))
    return ids, floats(where, logprobs)


def _steps(where: str, steps: Any) -> tuple[list[int], list[Any]]:
    """Return tokens and logprobs of a list of (logprob, token id, text)."""
    try:
        ids, logprobs = [step[1] for step in steps], [step[0] for step in steps]
    except (IndexError, KeyError, TypeError):
        expected = "(logprob, token id, text) for each token"
        raise InvalidInputError(where, expected, repr(steps)) from None
    return token_ids(where, ids, ""), logprobs


def _prompt(where: str, meta: Any) -> list[int]:
    ids, _ = _steps(f"{where}.input_token_logprobs", get(meta, "input_token_logprobs") or [])
    if len(ids) != get(meta, "prompt_tokens"):
        raise InvalidInputError(
            f"{where}.input_token_logprobs",
            f"all {get(meta, 'prompt_tokens')} tokens of the prompt: request them with "
            "return_logprob=True and logprob_start_len=0, or pass prompt_ids= as they were sent",
            f"{len(ids)}",
        )
    return ids
