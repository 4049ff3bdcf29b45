"""The data types of XTuner v1, with the fields of its source of 2026-08."""

from __future__ import annotations

from enum import Enum
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field


class Status(Enum):
    INIT = "init"
    COMPLETED = "completed"
    ABORTED = "aborted"
    EXPIRED = "expired"
    FAILED = "failed"
    FILTERED = "filtered"
    ARCHIVED = "archived"


class SampleParams(BaseModel):
    model_config = ConfigDict(extra="forbid")

    n: int = 1
    temperature: float = 1.0
    max_tokens: int = 2048
    stops: list[str] = []


class RolloutFunctionCall(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str
    arguments: Any = Field(default_factory=dict)


class RolloutToolCall(BaseModel):
    model_config = ConfigDict(extra="forbid")

    id: str
    function: RolloutFunctionCall


class RolloutState(BaseModel):
    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    group_id: int | None = None
    rollout_id: int | None = None
    message: list[dict[str, Any]]
    prompt_ids: list[int] | None = None
    tokens: list[int] | None = None
    mm_info: dict[str, Any] | None = None
    reward_model: dict[str, Any] | None = None
    tools: list[Any] | None = None
    sample_params: SampleParams = SampleParams()
    response: str | None = None
    tool_calls: list[RolloutToolCall] | None = None
    response_ids: list[int] | None = None
    logprobs: list[float] | None = None
    routed_experts: np.ndarray | Any | None = None
    finish_reason: str | None = None
    response_mask: list[int] | None = None
    response_model_steps: list[int] | None = None
    seq_staleness: int = 0
    reward: dict[str, Any] | None = None
    status: Status = Status.INIT
    error_msg: str | None = None
    extra_fields: dict[str, Any] = {}


def reset_rollout_response(state: RolloutState) -> RolloutState:
    """Leave only what it takes to roll the prompt again."""
    state.tokens = state.prompt_ids
    state.response, state.response_ids, state.logprobs = "", [], []
    state.response_mask = state.routed_experts = state.reward = state.finish_reason = None
    state.response_model_steps = []
    return state
