"""Decoded groups as `replaydb.analysis` reads them, built without a database."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from replaydb import EpisodeGroup
from replaydb.analysis.decoded_groups import DecodedGroup
from replaydb.batch.stored import StoredGroup
from replaydb.domain.episodes.flat import FlatEpisodes

_NAMES = (
    "run_id", "staleness", "times_sampled", "attempts", "times_replaced", "status_reason",
    "leased_from", "created_at", "completed_at", "first_sampled_at", "last_sampled_at",
    "archived_at", "buffer_name", "run_name", "run_lineage", "reward_mean", "reward_std",
)  # fmt: skip


def decoded_group(group: EpisodeGroup, parts: Sequence[FlatEpisodes] | None = None) -> DecodedGroup:
    """Return a group as it is read from a store, with its own parts or with others."""
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
    several = group.parts if parts is None else parts
    ends = [-1]
    for part in several:
        ends.append(max(ends[-1], -1) + max(1, part.num_episodes))
    starts = [max(0, end + 1) for end in ends[:-1]]
    texts = {i: text for i, text in enumerate(group.texts) if text is not None}
    return DecodedGroup.of(
        facts, StoredGroup(facts, dict(zip(starts, several, strict=True)), texts), starts
    )
