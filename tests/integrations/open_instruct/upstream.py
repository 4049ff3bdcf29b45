"""Stand-ins for open-instruct's classes, and items as it inserts them into its table.

The package is not on an index. The classes have the fields and annotations of its source. The
values have the types that its code produces, which differ from some annotations: a row's verifier
sources and ground truths are lists, timeouts are bools, and metrics are numpy scalars.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass
class ToolCallStats:
    tool_name: str
    success: bool
    runtime: float


@dataclass
class RequestInfo:
    num_calls: list[int]
    timeouts: list[int]
    tool_errors: list[str]
    tool_outputs: list[str]
    tool_runtimes: list[float]
    tool_calleds: list[bool]
    tool_call_stats: list[list[ToolCallStats]] = field(default_factory=list)
    rollout_states: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class TokenStatistics:
    num_prompt_tokens: int
    num_response_tokens: int
    generation_time: float
    earliest_start_time: float | None = None


@dataclass
class GenerationResult:
    responses: list[list[int]]
    finish_reasons: list[str]
    masks: list[list[int]]
    request_info: RequestInfo
    index: int | None
    prompt_id: str | None
    token_statistics: TokenStatistics | None = None
    start_time: float | None = None
    logprobs: list[list[float]] | None = None
    reward_scores: list[float] | None = None
    reward_metrics: dict[str, Any] | None = None
    model_step: int | None = None


@dataclass
class ProcessedResult:
    result: GenerationResult
    queries: list[list[int]]
    ground_truths: list[list[int]]
    datasets: list[str]
    raw_queries: list[str]
    active_tools: list[list[str] | None]
    decoded_responses: list[str]
    reward_scores: list[float]
    reward_metrics: dict[str, Any]
    percent_solved: float


class Uniform:
    """A selector; the table recognizes it by the name of its class."""


@dataclass
class MinSize:
    min_size: int


def processed(
    uid: str, rewards: tuple[float, ...] = (1.0, 0.0), model_step: int | None = None
) -> ProcessedResult:
    """A group of completions of three tokens, the second of which is tool output."""
    size = len(rewards)
    result = GenerationResult(
        responses=[[5, 6, 7 + i] for i in range(size)],
        finish_reasons=["stop", *["length"] * (size - 1)],
        masks=[[1, 0, 1]] * size,
        request_info=RequestInfo(
            num_calls=[1] * size,
            timeouts=[False] * size,
            tool_errors=[""] * size,
            tool_outputs=["6"] * size,
            tool_runtimes=[0.25] * size,
            tool_calleds=[True] * size,
            tool_call_stats=[[ToolCallStats("python", True, 0.25)]] * size,
            rollout_states=[{"step_count": i, "rewards": [0.1]} for i in range(size)],
        ),
        index=17,
        prompt_id=uid,
        token_statistics=TokenStatistics(2, 3 * size, 0.5),
        start_time=12.5,
        logprobs=[[-0.5, 0.0, -0.25]] * size,
        reward_scores=list(rewards),
        model_step=model_step,
    )
    return ProcessedResult(
        result=result,
        queries=[[1, 2]] * size,
        ground_truths=[["007"]] * size,  # type: ignore[list-item]
        datasets=[["gsm8k"]] * size,  # type: ignore[list-item]
        raw_queries=["2 + 2?"] * size,
        active_tools=[["python"], *[None] * (size - 1)],
        decoded_responses=[f"answer {i}" for i in range(size)],
        reward_scores=list(rewards),
        reward_metrics={"objective/verifiable_reward": np.float64(0.5), "per_tool": [0.25]},
        percent_solved=sum(rewards) / size,
    )
