"""The data types of XTuner v1, with the fields and rules of its source of 2026-08."""

from __future__ import annotations

from enum import Enum
from typing import Any, Literal

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
    raw_arguments_text: str | None = None


class RolloutToolCall(BaseModel):
    model_config = ConfigDict(extra="forbid")

    id: str
    type: Literal["function"] = "function"
    function: RolloutFunctionCall


class RolloutState(BaseModel):
    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    group_id: int | None = None
    message: list[dict[str, Any]]
    prompt_ids: list[int] | None = None
    num_tokens: int | None = None
    proxy_attn_flops: float | None = None
    data_source: dict[str, Any] | str | None = None
    mm_info: dict[str, Any] | None = None
    reward_model: dict[str, Any] | None = None
    session_id: int | None = None
    tokens: list[int] | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
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
    input_ids: list[int] | None = None
    labels: list[int] | None = None
    reward: dict[str, Any] | None = None
    rollout_id: int | None = None
    uid: int | None = None
    task_name: str | None = None
    status: Status = Status.INIT
    error_msg: str | None = None
    position_ids: np.ndarray | None = None
    extra_fields: dict[str, Any] = {}

    def model_post_init(self, context: Any, /) -> None:
        """Keep the old and the new name of an id equal."""
        if self.rollout_id is None:
            self.rollout_id = self.uid
        self.uid = self.rollout_id


#: The status of a group is the first of these that a member has, else COMPLETED.
WORST_FIRST = (Status.FAILED, Status.ABORTED, Status.EXPIRED, Status.FILTERED)


def get_group_status(group: list[RolloutState]) -> Status:
    members = {state.status for state in group}
    return next((one for one in WORST_FIRST if one in members), Status.COMPLETED)


def reset_rollout_response(state: RolloutState) -> RolloutState:
    """Reset all fields that are not needed to generate the response again."""
    state.tokens = None if state.prompt_ids is None else list(state.prompt_ids)
    state.response, state.response_ids, state.logprobs = "", [], []
    state.response_mask = state.routed_experts = state.reward = state.finish_reason = None
    state.response_model_steps, state.error_msg = [], None
    return state


def discard_rollout_state(state: RolloutState) -> RolloutState:
    """Reset all fields except the message."""
    for name, field in RolloutState.model_fields.items():
        if not field.is_required():
            setattr(state, name, field.get_default(call_default_factory=True))
    return state


def update_sample_version(state: RolloutState, model_step: int) -> RolloutState:
    """Assign a model step to tokens without one."""
    known = list(state.response_model_steps or [])
    missing = len(state.response_ids or []) - len(known)
    state.response_model_steps = known + [model_step] * missing
    return state


def refresh_seq_staleness(group: list[RolloutState], current_train_step: int) -> None:
    for state in group:
        steps = state.response_model_steps
        state.seq_staleness = current_train_step - min(steps) - 1 if steps else 0


def fresh_masks(
    group: list[RolloutState], step: int, threshold: int | None
) -> list[list[int] | None]:
    """Return per state its mask without tokens that are too stale, or None if not applicable."""
    if threshold is None or any(one.input_ids or one.labels for one in group):
        return [None] * len(group)

    def mask(state: RolloutState) -> list[int] | None:
        ids = state.response_ids
        asked = state.response_mask or [1] * len(ids or [])
        if not ids or not any(asked):
            return None
        steps = state.response_model_steps or []
        return [
            one * int(step - model - 1 < threshold)
            for one, model in zip(asked, steps, strict=False)
        ]

    return [mask(state) for state in group]
