"""What SGLang's own API returns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from replaydb import InvalidInputError
from replaydb.integrations.serving.completion import Completion
from replaydb.integrations.serving.fields import (
    as_many,
    finished,
    floats,
    get,
    parsed,
    said,
    token_ids,
    version,
)

_LOGPROBS = "those of return_logprob=True (over OpenAI's API: logprobs=True)"
_FINAL = "why it ended: only the last answer of a stream says so"


def from_sglang(response: Any, *, prompt_ids: Iterable[int] | None = None) -> list[Completion]:
    """The completions of an answer to `/generate`, or of `Engine.generate`; a list with n > 1.

    Args:
        response: One answer, or the list of them, as objects or JSON.
        prompt_ids: The tokens that were sent as `input_ids`. By default those of
            `input_token_logprobs`, which are there with `return_logprob` and `logprob_start_len=0`.

    Raises:
        InvalidInputError: Tokens or logprobs are missing, there are more or fewer than were
            sampled by `completion_tokens`, or it is not finished.
    """
    response = parsed(response)
    one_alone = isinstance(response, Mapping)
    if not one_alone and not isinstance(response, Sequence):
        raise InvalidInputError("response", "an answer, or a list of them", repr(response))
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
                version(get(meta, "weight_version")),
                metadata=said(request_id=get(meta, "id"), stop_reason=get(reason, "matched")),
            )
        )
    return found


def sampled(where: str, meta: Any, output_ids: Any) -> tuple[list[int], list[float]]:
    """Tokens and logprobs of SGLang's `meta_info`: (logprob, token id, text) of each."""
    steps = get(meta, "output_token_logprobs")
    if steps is None and get(meta, "completion_tokens") != 0:
        expected = f"tokens and logprobs: {_LOGPROBS}"
        raise InvalidInputError(f"{where}.output_token_logprobs", expected, "none")
    where = f"{where}.output_token_logprobs"
    ids, logprobs = _steps(where, steps or [])
    if output_ids is not None and token_ids("output_ids", output_ids, "") != ids:
        raise InvalidInputError(
            where,
            f"those of the {len(output_ids)} output tokens",
            f"those of {len(ids)} others",
        )
    as_many(where, ids, get(meta, "completion_tokens"))
    return ids, floats(where, logprobs)


def _steps(where: str, steps: Any) -> tuple[list[int], list[Any]]:
    """Tokens and logprobs of (logprob, token id, text) of each."""
    try:
        ids, logprobs = [step[1] for step in steps], [step[0] for step in steps]
    except (IndexError, KeyError, TypeError):
        raise InvalidInputError(where, "(logprob, token id, text) of each", repr(steps)) from None
    return token_ids(where, ids, ""), logprobs


def _prompt(where: str, meta: Any) -> list[int]:
    ids, _ = _steps(f"{where}.input_token_logprobs", get(meta, "input_token_logprobs") or [])
    if len(ids) != get(meta, "prompt_tokens"):
        raise InvalidInputError(
            f"{where}.input_token_logprobs",
            f"those of all {get(meta, 'prompt_tokens')} tokens of the prompt, which are there "
            "with return_logprob=True and logprob_start_len=0; or prompt_ids= as they were sent",
            f"{len(ids)}",
        )
    return ids
