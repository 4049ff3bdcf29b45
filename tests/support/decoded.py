"""Decoded groups as `replaydb.analysis` reads them, built without a database."""

from __future__ import annotations

from typing import Any

from replaydb import EpisodeGroup
from replaydb.analysis.decoded_groups import DecodedGroup
from replaydb.batch.stored import StoredGroup

_NAMES = (
    "run_id", "staleness", "times_sampled", "attempts", "times_replaced", "status_reason",
    "times_annotated", "leased_from", "created_at", "completed_at", "first_sampled_at",
    "last_sampled_at", "archived_at", "buffer_name", "run_name", "run_lineage", "reward_mean",
    "reward_std",
)  # fmt: skip


def decoded_group(group: EpisodeGroup) -> DecodedGroup:
    """Return a group as it is read from a store."""
    facts: dict[str, Any] = {
        **dict.fromkeys(_NAMES),
        "id": 1,
        "task_name": group.task_name,
        "group_uid": group.group_uid,
        "prompt_uid": group.prompt_uid,
        "group_status": group.status.value,
        "priority": group.priority,
        "tags": group.tags,
        "num_episodes": group.num_episodes,
        "expected_episodes": group.expected_episodes,
    }
    stored = StoredGroup(facts, dict(enumerate(group.episodes)), group.context)
    return DecodedGroup.of(facts, stored)
