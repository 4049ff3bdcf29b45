"""Groups as analysis reads them, without a database."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from replaydb import EpisodeGroup
from replaydb.analysis.episode_rows import Whole
from replaydb.batch.stored import StoredGroup
from replaydb.episodes.flat import FlatEpisodes

_NAMES = (
    "run_id", "staleness", "times_sampled", "attempts", "times_replaced", "status_reason",
    "leased_from", "created_at", "completed_at", "first_sampled_at", "last_sampled_at",
    "archived_at", "buffer_name", "run_name", "run_lineage", "reward_mean", "reward_std",
)  # fmt: skip


def whole_of(group: EpisodeGroup, parts: Sequence[FlatEpisodes] | None = None) -> Whole:
    """A group as it is read, in the parts it has or in others."""
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
    places = [-1]
    for part in several:
        places.append(max(places[-1], -1) + max(1, part.num_episodes))
    starts = [max(0, place + 1) for place in places[:-1]]
    texts = {i: text for i, text in enumerate(group.texts) if text is not None}
    return Whole.of(
        facts, StoredGroup(facts, dict(zip(starts, several, strict=True)), texts), starts
    )
