"""slime's `Sample`, or a stand-in with its fields: the package is not on an index."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from typing import Any

try:
    from slime.utils.types import Sample as Sample
except ImportError:

    class Status(Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    @dataclass
    class SpecInfo:
        spec_accept_token_num: int = 0
        spec_draft_token_num: int = 0
        spec_verify_ct: int = 0
        completion_token_num: int = 0

    @dataclass
    class PrefixCacheInfo:
        cached_tokens: int = 0
        total_prompt_tokens: int = 0

    @dataclass
    class Sample:  # type: ignore[no-redef]
        """The fields of the source of 2026-08. Other attributes are fields of `to_dict`, too."""

        group_index: int | None = None
        index: int | None = None
        rollout_id: int | None = None
        prompt: str | list[dict[str, Any]] = ""
        tokens: list[int] = field(default_factory=list)
        multimodal_inputs: dict[str, Any] | None = None
        multimodal_train_inputs: dict[str, Any] | None = None
        multimodal_train_input_id: str | None = None
        apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
        response: str = ""
        response_length: int = 0
        label: str | None = None
        reward: float | dict[str, Any] | None = None
        loss_mask: list[int] | None = None
        weight_versions: list[str] = field(default_factory=list)
        rollout_log_probs: list[float] | None = None
        rollout_top_p_token_ids: Any = None
        rollout_top_p_token_offsets: Any = None
        rollout_routed_experts: Any = None
        remove_sample: bool = False
        teacher_log_probs: list[float] | None = None
        status: Status = Status.PENDING
        metadata: dict[str, Any] = field(default_factory=dict)
        generate_function_path: str | None = None
        custom_rm_path: str | None = None
        train_metadata: dict[str, Any] | None = None
        session_id: str | None = None
        non_generation_time: float = 0.0
        spec_info: SpecInfo = field(default_factory=SpecInfo)
        prefix_cache_info: PrefixCacheInfo = field(default_factory=PrefixCacheInfo)

        def to_dict(self) -> dict[str, Any]:
            return vars(self) | {
                "status": self.status.value,
                "spec_info": asdict(self.spec_info),
                "prefix_cache_info": asdict(self.prefix_cache_info),
            }

        @staticmethod
        def from_dict(values: dict[str, Any]) -> Sample:
            made = Sample()
            vars(made).update(values)
            made.status = Status(values["status"])
            made.spec_info = SpecInfo(**values["spec_info"])
            made.prefix_cache_info = PrefixCacheInfo(**values["prefix_cache_info"])
            return made


FIELDS = {one.name for one in fields(Sample)}
