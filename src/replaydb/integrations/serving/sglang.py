"""What SGLang's own API returns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from replaydb import InvalidInputError
from replaydb.integrations.serving.completion import Completion
from replaydb.integrations.serving.fields import finished, floats, get, said, version

_LOGPROBS = "those of return_logprob=True (over OpenAI's API: logprobs=True)"
_FINAL = "why it ended: only the last answer of a stream says so"


def from_sglang(response: Any, *, prompt_ids: Iterable[int] | None = None) -> list[Completion]:
    """The completions of an answer to `/generate`, or of `Engine.generate`; a list with n > 1.

    Args:
        response: One answer, or the list of them.
        prompt_ids: The tokens that were sent as `input_ids`. By default those of
            `input_token_logprobs`, which are there with `return_logprob` and `logprob_start_len=0`.

    Raises:
        InvalidInputError: Tokens or logprobs are missing, or it is not finished.
    """
    one_alone = isinstance(response, Mapping)
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
    ids = [step[1] for step in steps or []]
    if output_ids is not None and list(output_ids) != ids:
        raise InvalidInputError(
            f"{where}.output_token_logprobs",
            f"those of the {len(output_ids)} output tokens",
            f"those of {len(ids)} others",
        )
    return ids, floats(step[0] for step in steps or [])


def _prompt(where: str, meta: Any) -> list[int]:
    steps = get(meta, "input_token_logprobs") or []
    if len(steps) != get(meta, "prompt_tokens"):
        raise InvalidInputError(
            f"{where}.input_token_logprobs",
            f"those of all {get(meta, 'prompt_tokens')} tokens of the prompt, which are there "
            "with return_logprob=True and logprob_start_len=0; or prompt_ids= as they were sent",
            f"{len(steps)}",
        )
    return [step[1] for step in steps]
