"""Handwritten responses in the engines' formats: "2 + 2 =" (tokens 1, 2, 3), two completions.

vLLM: `RequestOutput`, its OpenAI server with `return_token_ids`, and `/inference/v1/generate`.
SGLang: `/generate`, and its OpenAI server with `return_meta_info` and `return_prompt_token_ids`.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

PROMPT = [1, 2, 3]
RIGHT, WRONG = [4, 9], [5, 6, 9]
NEG_INF = float("-inf")


def logprob(value: float | None, token: str) -> SimpleNamespace:
    return SimpleNamespace(logprob=value, rank=1, decoded_token=token)


def spans(*several: tuple[Any, int, int]) -> list[dict[str, Any]]:
    """Return `weight_versions`, as both servers report them: a version, a start and an end each."""
    return [{"version": label, "start": start, "end": end} for label, start, end in several]


def vllm_output(**changes: Any) -> SimpleNamespace:
    """Output of `LLM.generate` for one prompt, with `SamplingParams(n=2, logprobs=1)`."""
    right = SimpleNamespace(
        index=0,
        text=" 4",
        token_ids=RIGHT,
        cumulative_logprob=-0.75,
        logprobs=[{4: logprob(-0.5, " 4"), 5: logprob(-1.5, " 5")}, {9: logprob(-0.25, "")}],
        routed_experts=None,
        finish_reason="stop",
        stop_reason=None,
        lora_request=None,
    )
    wrong = SimpleNamespace(
        index=1,
        text=" 5!",
        token_ids=tuple(WRONG),  # of any sequence
        cumulative_logprob=-4.0,
        logprobs=[
            {4: logprob(-0.5, " 4"), 5: logprob(-1.5, " 5")},  # the best is not the sampled one
            {6: logprob(-2.0, "!")},
            {9: logprob(-0.5, "")},
        ],
        routed_experts=None,
        finish_reason="length",
        stop_reason=None,
        lora_request=None,
    )
    fields: dict[str, Any] = {
        "request_id": "7",
        "prompt": "2 + 2 =",
        "prompt_token_ids": PROMPT,
        "prompt_logprobs": None,
        "outputs": [right, wrong],
        "finished": True,
        "metrics": None,
        "num_cached_tokens": 0,
    }
    return SimpleNamespace(**{**fields, **changes})


def sglang_answer(
    ids: list[int] = RIGHT, logprobs: tuple[float | None, ...] = (-0.5, -0.25), **meta: Any
) -> dict[str, Any]:
    """Response of `/generate`, with `return_logprob` and `logprob_start_len=0`."""
    return {
        "text": " 4" if ids == RIGHT else " 5!",
        "output_ids": list(ids),
        "meta_info": {
            "id": "0b7f",
            "finish_reason": {"type": "stop", "matched": 9},
            "prompt_tokens": 3,
            "weight_version": "12",
            "total_retractions": 0,
            "input_token_logprobs": [[None, 1, None], [-3.0, 2, None], [-1.0, 3, None]],
            "output_token_logprobs": [
                [value, token, None] for value, token in zip(logprobs, ids, strict=True)
            ],
            "completion_tokens": len(ids),
            "cached_tokens": 2,
            "e2e_latency": 0.1,
            **meta,
        },
    }


def _content(values: dict[str, float]) -> dict[str, Any]:
    return {
        "content": [
            {"token": token, "logprob": value, "bytes": list(token.encode()), "top_logprobs": []}
            for token, value in values.items()
        ]
    }


_VLLM_CHAT = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1790000000,
    "model": "qwen",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": " 4", "refusal": None},
            "logprobs": _content({" 4": -0.5, "": -0.25}),
            "finish_reason": "stop",
            "stop_reason": None,
            "token_ids": RIGHT,
        },
        {
            "index": 1,
            "message": {"role": "assistant", "content": " 5!", "refusal": None},
            "logprobs": _content({" 5": -1.5, "!": -2.0, "": -9999.0}),
            "finish_reason": "length",
            "stop_reason": None,
            "token_ids": WRONG,
        },
    ],
    "usage": {"prompt_tokens": 3, "total_tokens": 8, "completion_tokens": 5},
    "prompt_logprobs": None,
    "prompt_token_ids": PROMPT,
    "kv_transfer_params": None,
}


def vllm_chat() -> dict[str, Any]:
    """Response of `/v1/chat/completions` with `n=2`, `logprobs` and `return_token_ids`."""
    return copy.deepcopy(_VLLM_CHAT)


def sglang_chat() -> dict[str, Any]:
    """Response of SGLang's `/v1/chat/completions`, with `logprobs` and both token options."""
    answer = sglang_answer()
    return {
        "id": "0b7f",
        "object": "chat.completion",
        "created": 1790000000,
        "model": "qwen",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": " 4",
                    "reasoning_content": "easy",
                    "tool_calls": None,
                },
                "logprobs": _content({" 4": -0.5, "": -0.25}),
                "finish_reason": "stop",
                "matched_stop": 9,
                "prompt_token_ids": PROMPT,
                "meta_info": answer["meta_info"],
            }
        ],
        "usage": {"prompt_tokens": 3, "total_tokens": 5, "completion_tokens": 2},
        "metadata": {"weight_version": "12"},
    }


def vllm_completion() -> dict[str, Any]:
    """Response of `/v1/completions` with `logprobs=1` and `return_token_ids`."""
    return {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 1790000000,
        "model": "qwen",
        "choices": [
            {
                "index": 0,
                "text": " 4",
                "logprobs": {
                    "text_offset": [0, 2],
                    "token_logprobs": [None, -0.25],
                    "tokens": [" 4", ""],
                    "top_logprobs": [None, {"": -0.25}],
                },
                "finish_reason": "stop",
                "stop_reason": "###",
                "token_ids": RIGHT,
                "prompt_logprobs": None,
                "prompt_token_ids": PROMPT,
            }
        ],
        "usage": {"prompt_tokens": 3, "total_tokens": 5, "completion_tokens": 2},
    }


def vllm_generate() -> dict[str, Any]:
    """Response of `/inference/v1/generate` with `n=2`, `logprobs` and `return_token_ids`."""

    def choice(index: int, ids: list[int], logprobs: list[float], **fields: Any) -> dict[str, Any]:
        content = [
            {"token_id": token, "logprob": value, "rank": 1, "top_logprobs": []}
            for token, value in zip(ids, logprobs, strict=True)
        ]
        return {
            "index": index,
            "finish_reason": "stop",
            "stop_reason": None,
            "token_ids": list(ids),
            "routed_experts": None,
            "sampling_mask": None,
            "weight_versions": spans(("12", 0, len(ids))),
            "logprobs": {"content": content},
            **fields,
        }

    return {
        "request_id": "5d0c",
        "model": "qwen",
        "created": 1790000000,
        "usage": {"prompt_tokens": 3, "total_tokens": 8, "completion_tokens": 5},
        "prompt_logprobs": None,
        "prompt_token_ids": list(PROMPT),
        "output_mode": "tokens",
        "choices": [
            choice(0, RIGHT, [-0.5, -0.25]),
            choice(1, WRONG, [-1.5, -2.0, -9999.0], finish_reason="length"),
        ],
    }


def vllm_tool_call() -> dict[str, Any]:
    """Chat response with a tool call and no text."""
    answer = vllm_chat()
    del answer["choices"][1]
    answer["usage"] = {"prompt_tokens": 3, "total_tokens": 5, "completion_tokens": 2}
    answer["choices"][0] |= {
        "finish_reason": "tool_calls",
        "message": {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "add", "arguments": '{"a": 2, "b": 2}'},
                }
            ],
            "reasoning": "a sum",
        },
    }
    return answer


def vllm_chunks() -> list[dict[str, Any]]:
    """Both choices of `vllm_chat`, with a tool call in the second, as a stream."""

    def chunk(index: int, delta: dict[str, Any], **fields: Any) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **fields}
        return {
            "id": "chatcmpl-1",
            "object": "chat.completion.chunk",
            "created": 1790000000,
            "model": "qwen",
            "choices": [choice],
        }

    def call(arguments: str, **fields: Any) -> dict[str, Any]:
        function = {"arguments": arguments, **fields.pop("function", {})}
        return {"tool_calls": [{"index": 0, "function": function, **fields}]}

    return [
        {
            **chunk(0, {"role": "assistant", "content": ""}),
            "prompt_token_ids": PROMPT,
        },
        chunk(1, {"role": "assistant", "content": ""}),
        chunk(0, {"content": " 4"}, token_ids=[4], logprobs=_content({" 4": -0.5})),
        chunk(
            1,
            call("{", id="call_1", type="function", function={"name": "add"}),
            token_ids=[5],
            logprobs=_content({" 5": -1.5}),
        ),
        chunk(1, call("}"), token_ids=[6], logprobs=_content({"!": -2.0})),
        chunk(1, {}, token_ids=[9], logprobs=_content({"": -0.5}), finish_reason="tool_calls"),
        chunk(0, {}, token_ids=[9], logprobs=_content({"": -0.25}), finish_reason="stop"),
        {
            "id": "chatcmpl-1",
            "object": "chat.completion.chunk",
            "created": 1790000000,
            "model": "qwen",
            "choices": [],
            "usage": {"prompt_tokens": 3, "total_tokens": 8, "completion_tokens": 5},
        },
    ]
