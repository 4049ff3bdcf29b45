"""What open-instruct puts into its table, as its source of 2026-04 has it: not on the index."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class RequestInfo:
    num_calls: list[int]
    timeouts: list[int]
    tool_errors: list[str]
    tool_outputs: list[str]
    tool_runtimes: list[float]
    tool_calleds: list[bool]
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
    """A selector; the table goes by the name of its class."""


@dataclass
class MinSize:
    min_size: int


def processed(
    uid: str, rewards: tuple[float, ...] = (1.0, 0.0), model_step: int | None = None
) -> ProcessedResult:
    """A group of completions of three tokens, the second of which a tool said."""
    size = len(rewards)
    result = GenerationResult(
        responses=[[5, 6, 7 + i] for i in range(size)],
        finish_reasons=["stop", *["length"] * (size - 1)],
        masks=[[1, 0, 1]] * size,
        request_info=RequestInfo(
            num_calls=[1] * size,
            timeouts=[0] * size,
            tool_errors=[""] * size,
            tool_outputs=["6"] * size,
            tool_runtimes=[0.25] * size,
            tool_calleds=[True] * size,
            rollout_states=[{"step": i} for i in range(size)],
        ),
        index=17,
        prompt_id=uid,
        token_statistics=TokenStatistics(2, 3 * size, 0.5),
        start_time=12.5,
        logprobs=[[-0.5, 0.0, -0.25]] * size,
        model_step=model_step,
    )
    return ProcessedResult(
        result=result,
        queries=[[1, 2]] * size,
        ground_truths=[[9, 9]] * size,
        datasets=["gsm8k"] * size,
        raw_queries=["2 + 2?"] * size,
        active_tools=[["python"], *[None] * (size - 1)],
        decoded_responses=[f"answer {i}" for i in range(size)],
        reward_scores=list(rewards),
        reward_metrics={"verifiable": 0.5, "per_tool": [0.25, float("inf")]},
        percent_solved=sum(rewards) / size,
    )
