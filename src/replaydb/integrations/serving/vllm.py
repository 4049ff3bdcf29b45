"""Outputs of vLLM's Python API."""

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
    non_empty,
    token_ids,
    versions,
)

_PROMPT = "vLLM reports them for every prompt except prompt_embeds"
_LOGPROBS = "request them with SamplingParams(logprobs=0)"
_FINAL = "a finish reason: an output is complete if `finished`, or with output_kind=FINAL_ONLY"


def from_vllm(output: Any) -> list[Completion]:
    """Convert a finished `RequestOutput` to completions, sorted by index.

    Raises:
        InvalidInputError: Tokens or logprobs are missing, or the output is not finished.
    """
    prompt_ids = token_ids("prompt_token_ids", get(output, "prompt_token_ids"), _PROMPT)
    found = []
    for where, one in in_order("outputs", get(output, "outputs")):
        ids = token_ids(f"{where}.token_ids", get(one, "token_ids"), "a CompletionOutput has them")
        steps = aligned(f"{where}.logprobs", get(one, "logprobs"), ids, _LOGPROBS)
        logprobs = []
        for i, (token, step) in enumerate(zip(ids, steps, strict=True)):
            if step is not None and not (isinstance(step, Mapping) and token in step):
                raise InvalidInputError(
                    f"{where}.logprobs[{i}]", f"a logprob of the sampled token {token}", repr(step)
                )
            logprobs.append(None if step is None else get(step[token], "logprob"))
        found.append(
            Completion(
                prompt_ids,
                ids,
                floats(f"{where}.logprobs", logprobs),
                get(one, "text"),
                finished(f"{where}.finish_reason", get(one, "finish_reason"), _FINAL),
                versions(f"{where}.", one, len(ids)),
                get(output, "prompt"),
                metadata=non_empty(
                    request_id=get(output, "request_id"), stop_reason=get(one, "stop_reason")
                ),
            )
        )
    return found
