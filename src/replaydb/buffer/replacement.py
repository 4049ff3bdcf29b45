"""Replace zero-variance groups of a batch by replayed groups."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import compress

import numpy as np
from sqlalchemy import ColumnElement

from replaydb.batch.batch import Batch
from replaydb.buffer.buffer import Buffer
from replaydb.database.filters import compiling
from replaydb.database.filters.group_columns import col
from replaydb.database.repository.puts import OnDuplicate
from replaydb.database.tables.records import Priority
from replaydb.domain import checks
from replaydb.domain.episodes import EpisodeGroup, GroupStatus
from replaydb.domain.policies import Lifo, Mix, Prioritized, Share, SimplePolicy
from replaydb.errors import CorruptPayloadError

#: Tag with the reason why a group was filtered.
REASON_TAG = "filtered"


@dataclass(frozen=True, slots=True, eq=False)
class Replacement:
    """Result of `replace_uninformative`.

    Attributes:
        batch: The batch to train on: one group per fresh group, in their order. A stored group
            stands in for each zero-variance group, as far as there are enough.
        fresh_ids: Ids of the fresh groups in the batch.
        filtered_ids: Ids of the zero-variance groups, put as `filtered`. A full buffer may have
            archived or deleted them at once.
        replayed_ids: Ids of the stored groups in the batch.
        missing: Indexes of the fresh groups for which the batch has no group. A zero-variance group
            is missing if the buffer had too few replacements. Another group is never replaced; it
            is missing if it was too stale, refused by a full buffer, damaged, or taken by another
            consumer.
    """

    batch: Batch
    fresh_ids: list[int]
    filtered_ids: list[int]
    replayed_ids: list[int]
    missing: list[int]

    @property
    def num_missing(self) -> int:
        """Number of groups that are missing in the batch."""
        return len(self.missing)


def is_informative(group: EpisodeGroup, tolerance: float = 1e-6) -> bool:
    """Whether the rewards of a group differ: `max - min > tolerance`. False without rewards."""
    low, high = group.reward_min, group.reward_max
    return low is not None and high is not None and high - low > tolerance


async def replace_uninformative(
    groups: Iterable[EpisodeGroup],
    buffer: Buffer,
    policy: SimplePolicy = Prioritized(),
    *,
    tolerance: float = 1e-6,
    informative: Callable[[EpisodeGroup], bool | np.bool_] | None = None,
    where: ColumnElement[bool] | None = None,
    max_staleness: int | None = None,
    priority: Priority | Callable[[EpisodeGroup], Priority] | None = None,
    on_duplicate: OnDuplicate = "error",
    step: int | None = None,
) -> Replacement:
    """Store fresh groups and draw a batch in which replay replaces zero-variance groups.

    If all rewards of a group are equal, every group-relative advantage is 0. (The "dynamic
    sampling" of DAPO, Yu et al., 2025, generates more groups instead.) All groups are stored, in
    one transaction: zero-variance groups as `filtered`, with a tag that has the reason. The batch
    is one recorded draw, with the fresh groups first.

    Fresh groups never evict each other. In a full buffer the informative ones evict other groups,
    as in any put; the zero-variance ones evict nothing.

    Args:
        groups: Fresh groups of one step.
        buffer: Buffer to store the groups in and to replay from.
        policy: Sampling strategy for the stored groups.
        tolerance: Maximum difference of rewards that count as equal.
        informative: Function that returns whether to train on a fresh group. Default: whether its
            rewards differ.
        where: Condition over `replaydb.col` for the replayed groups. Default: their rewards differ.
        max_staleness: Maximum staleness, in policy versions, of fresh and stored groups.
        priority: As for `Buffer.put`.
        on_duplicate: As for `Buffer.put`. A trainer that resumes from a checkpoint repeats steps
            that are already stored; with "renew" the regenerated groups take their place.
        step: Trainer step to record with the draw.

    Returns:
        The batch and which groups it consists of.

    Raises:
        InvalidInputError: An argument is invalid, or `informative` did not return a bool. Nothing
            was stored.
        DuplicateGroupError: A group is already in the buffer and `on_duplicate` is "error", or it
            was consumed and `on_duplicate` is "replace". Nothing was stored.
        RateLimitedError: The rate limit of the buffer blocks the draw. All groups were stored.
    """
    fresh = checks.instances("groups", groups, EpisodeGroup)
    if not fresh:
        return Replacement(_NOTHING, [], [], [], [])
    close = checks.number("tolerance", tolerance, least=0.0)
    checks.optional(checks.whole_number, "max_staleness", max_staleness)
    checks.optional(checks.whole_number, "step", step)
    checks.optional(checks.function, "informative", informative)
    judge = informative or partial(is_informative, tolerance=close)
    verdicts = [
        checks.flag(f"informative(groups[{i}])", judge(group)) for i, group in enumerate(fresh)
    ]
    wanted = verdicts.count(False)
    differ = col.reward_max - col.reward_min > close
    replay = Share(wanted, policy, where=differ if where is None else where, minimum=wanted)
    compiling.checked(replay.where)
    reason = "uninformative" if informative else f"rewards within {close:g} of each other"
    ids = await buffer.put(
        [
            group if verdict else _filtered(group, reason)
            for group, verdict in zip(fresh, verdicts, strict=True)
        ],
        priority=priority,
        on_duplicate=on_duplicate,
    )
    kept = list(compress(ids, verdicts))
    filtered = [group_id for group_id in ids if group_id not in set(kept)]
    # No group is in two shares, so a fresh group cannot also be replayed.
    fresh_share = Share(len(kept), Lifo(), where=col.id.in_(kept), minimum=len(kept))
    mix = Mix([fresh_share, replay])
    try:
        drawn = await buffer.sample(
            len(ids), mix, max_staleness=max_staleness, step=step, at_least=0
        )
    except CorruptPayloadError as error:
        drawn = _NOTHING if error.batch is None else error.batch
    return _arranged(drawn, ids, kept, filtered)


_NOTHING: Batch = Batch([])


def _arranged(drawn: Batch, ids: list[int], kept: list[int], filtered: list[int]) -> Replacement:
    """Put the drawn groups at the positions of the fresh ones."""
    position = {group_id: i for i, group_id in enumerate(drawn.ids)}
    fresh = set(ids)
    others = iter([group_id for group_id in drawn.ids if group_id not in fresh])
    replaced = set(filtered)
    chosen = [
        next(others, None) if group_id in replaced else group_id if group_id in position else None
        for group_id in ids
    ]
    order = [position[group_id] for group_id in chosen if group_id is not None]
    batch = Batch(
        [drawn[i] for i in order],
        drawn.probabilities[order],
        drawn.weights[order],
        drawn.draw_id,
    )
    return Replacement(
        batch=batch,
        fresh_ids=[group_id for group_id in kept if group_id in position],
        filtered_ids=filtered,
        replayed_ids=[group_id for group_id in batch.ids if group_id not in fresh],
        missing=[i for i, group_id in enumerate(chosen) if group_id is None],
    )


def _filtered(group: EpisodeGroup, reason: str) -> EpisodeGroup:
    filtered = copy(group)
    filtered.status = GroupStatus.FILTERED
    filtered.tags = {**group.tags, REASON_TAG: reason}
    return filtered
