"""What vLLM's Python API returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from replaydb import InvalidInputError
from replaydb.integrations.serving.completion import Completion
from replaydb.integrations.serving.fields import (
    aligned,
    finished,
    floats,
    get,
    in_order,
    said,
    token_ids,
)

_PROMPT = "those that vLLM has of every prompt but prompt_embeds"
_LOGPROBS = "those of SamplingParams(logprobs=0)"
_FINAL = "why it ended: an output is whole when `finished`, or with output_kind=FINAL_ONLY"


def from_vllm(output: Any) -> list[Completion]:
    """The completions of a finished `RequestOutput`, in the order of their index.

    Raises:
        InvalidInputError: Tokens or logprobs are missing, or it is not finished.
    """
    prompt_ids = token_ids("prompt_token_ids", get(output, "prompt_token_ids"), _PROMPT)
    found = []
    for where, one in in_order("outputs", get(output, "outputs")):
        ids = token_ids(f"{where}.token_ids", get(one, "token_ids"), "those of a CompletionOutput")
        steps = aligned(f"{where}.logprobs", get(one, "logprobs"), ids, _LOGPROBS)
        logprobs = []
        for i, (token, step) in enumerate(zip(ids, steps, strict=True)):
            if step is not None and not (isinstance(step, Mapping) and token in step):
                raise InvalidInputError(
                    f"{where}.logprobs[{i}]", f"that of the sampled token {token}", repr(step)
                )
            logprobs.append(None if step is None else get(step[token], "logprob"))
        found.append(
            Completion(
                prompt_ids,
                ids,
                floats(f"{where}.logprobs", logprobs),
                get(one, "text"),
                finished(f"{where}.finish_reason", get(one, "finish_reason"), _FINAL),
                prompt=get(output, "prompt"),
                metadata=said(
                    request_id=get(output, "request_id"), stop_reason=get(one, "stop_reason")
                ),
            )
        )
    return found
