"""verifiers' `WireTrace`, or a stand-in with its fields: the package needs another `openai`.

The stand-in has the fields of 0.4.0, and those that its repository had in 2026-08 instead.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, field_serializer, field_validator

try:
    from verifiers.v1.graph import MessageNode as MessageNode
    from verifiers.v1.trace import WireTrace as WireTrace
except ImportError:

    def _sent(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: _sent(one) for name, one in value.items()}
        if not isinstance(value, np.ndarray):
            return value
        its = {"dtype": str(value.dtype), "shape": list(value.shape), "data": value.tobytes()}
        return {"__nd__": True, **its}

    def _received(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if "__nd__" not in value:
            return {name: _received(one) for name, one in value.items()}
        return np.frombuffer(value["data"], value["dtype"]).reshape(value["shape"])

    class State(BaseModel):
        artifacts: dict[str, bytes | None] = {}

    class MessageNode(BaseModel):  # type: ignore[no-redef]
        model_config = ConfigDict(arbitrary_types_allowed=True)

        parent: int | None = None
        tools: list[Any] = Field(default=[], exclude_if=lambda tools: not tools)
        semantic_parents: list[Any] = []
        message: dict[str, Any]
        sampled: bool = False
        timestamp: float = 0.0
        token_ids: list[int] = []
        renderer_token_ids: list[int] | None = Field(default=None, exclude=True)
        mask: list[bool] = []
        is_content: list[bool] = []
        logprobs: list[float] = []
        advantages: list[float] | None = None
        reference_logprobs: list[float] | None = None
        trainer_logprobs: list[float] | None = None
        entropies: list[float] | None = None
        loss_weights: dict[str, list[float]] | None = None
        routed_experts: Any = None
        sampling_mask: Any = None
        multi_modal_data: Any = None
        kept_tokens: Any = None

        @field_serializer(  # type: ignore[untyped-decorator]
            "routed_experts", "sampling_mask", "multi_modal_data", "kept_tokens"
        )
        def _serialize(self, value: Any) -> Any:
            return _sent(value)

        @field_validator(  # type: ignore[untyped-decorator]
            "routed_experts", "sampling_mask", "kept_tokens", mode="before"
        )
        @classmethod
        def _validate(cls, value: Any) -> Any:
            return _received(value)

    class WireTrace(BaseModel):  # type: ignore[no-redef]
        version: int = 1
        id: str
        verifiers: dict[str, Any]
        task: dict[str, Any]
        agent: dict[str, Any]
        tools: list[Any] = []
        nodes: list[MessageNode] = []
        calls: list[Any] = []
        mm_token_type_id_map: dict[int, int] = {}
        request_rewrites: list[Any] = []
        response_rewrites: list[Any] = []
        rewards: dict[str, Any] = {}
        metrics: dict[str, float | None] = {}
        info: dict[str, Any] = {}
        root_reply: str | None = None
        state: State = Field(default_factory=State, exclude=True)
        extra_usage: list[Any] = []
        is_completed: bool = False
        ok: bool = False
        stop_condition: str | None = None
        is_timeout: bool = False
        errors: list[Any] = []
        timing: dict[str, Any]

        @field_serializer("mm_token_type_id_map")  # type: ignore[untyped-decorator]
        def _serialize(self, mapping: dict[int, int]) -> dict[str, int]:
            return {str(key): value for key, value in mapping.items()}


TRACE_FIELDS = set(WireTrace.model_fields)
NODE_FIELDS = set(MessageNode.model_fields)
