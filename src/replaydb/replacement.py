"""Replay in the place of groups that teach nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import compress

import numpy as np
from sqlalchemy import ColumnElement

from replaydb import checks
from replaydb.batch.batch import Batch
from replaydb.buffer import Buffer
from replaydb.database import filters
from replaydb.database.group_columns import col
from replaydb.database.repository.puts import OnDuplicate
from replaydb.episodes import EpisodeGroup, GroupStatus
from replaydb.errors import CorruptPayloadError
from replaydb.policies import Lifo, Mix, Prioritized, Share, SimplePolicy

#: The tag that says why a group was filtered.
REASON_TAG = "filtered"


@dataclass(frozen=True, slots=True, eq=False)
class Replacement:
    """What `replace_uninformative` made of some fresh groups.

    Attributes:
        batch: What to train on: a group for each fresh one, in their order; a stored one in the
            place of each that was uninformative, as long as there are any.
        fresh_ids: Ids of the informative fresh groups in the batch.
        filtered_ids: Ids of the uninformative ones, put as `filtered`; a full buffer may have no
            room for them.
        replayed_ids: Ids of the stored groups in the batch.
        missing: Positions, among the fresh groups, that the batch has nothing for. In the place of
            an uninformative one, the buffer had too few; an informative one is not replaced, and
            was too stale, refused by a full buffer, damaged, or taken by somebody else meanwhile.
    """

    batch: Batch
    fresh_ids: list[int]
    filtered_ids: list[int]
    replayed_ids: list[int]
    missing: list[int]

    @property
    def num_missing(self) -> int:
        """How many groups the batch is short of."""
        return len(self.missing)


def is_informative(group: EpisodeGroup, tolerance: float = 1e-6) -> bool:
    """Whether its rewards differ, `max - min > tolerance`; not so where there are none."""
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
    priority: float | Callable[[EpisodeGroup], float] | None = None,
    on_duplicate: OnDuplicate = "error",
    step: int | None = None,
) -> Replacement:
    """Store fresh groups and draw a batch in which replay takes the place of uninformative ones.

    In a group whose rewards are all equal every group-relative advantage is 0 (the "dynamic
    sampling" of DAPO, Yu et al., 2025, generates more instead). All groups are stored, in one
    transaction: uninformative ones as `filtered`, with a tag that says why. The batch is one
    recorded draw, which has the fresh groups first.

    Fresh groups never take the place of their neighbours. In a full buffer the informative ones
    make room for themselves, as in any put; the others push out nothing.

    Args:
        groups: Fresh groups of one step.
        buffer: Where they go, and replay comes from.
        policy: How stored groups are chosen.
        tolerance: Rewards that are this close are equal.
        informative: Whether a fresh group teaches something; by default whether its rewards differ.
        where: Only stored groups that meet this expression over `replaydb.col` replace others; by
            default those whose rewards differ.
        max_staleness: Only groups, fresh or stored, at most this many policy versions behind.
        priority: As for `Buffer.put`.
        on_duplicate: As for `Buffer.put`: a trainer that goes on from a checkpoint, and so comes by
            steps that were stored before, lets the same uids "replace" what they named.
        step: The trainer step, for the record.

    Raises:
        InvalidInputError: An argument is wrong, or `informative` did not say True or False; nothing
            was stored.
        DuplicateGroupError: Under `on_duplicate="error"`, a group is in the buffer already; nothing
            was stored.
        RateLimitedError: The buffer's rate limit does not let so many out; all were stored.
    """
    fresh = checks.instances("groups", groups, EpisodeGroup)
    if not fresh:
        return Replacement(_NOTHING, [], [], [], [])
    close = checks.number("tolerance", tolerance, least=0.0)
    checks.optional(checks.whole_number, "max_staleness", max_staleness)
    checks.optional(checks.whole_number, "step", step)
    checks.optional(checks.function, "informative", informative)
    verdicts = _verdicts(fresh, close, informative)
    wanted = verdicts.count(False)
    differ = col.reward_max - col.reward_min > close
    replay = Share(wanted, policy, where=differ if where is None else where, minimum=wanted)
    filters.checked(replay.where)
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
    # No group is in two shares, so what is fresh cannot be replayed at once.
    fresh_share = Share(len(kept), Lifo(), where=col.id.in_(kept), minimum=len(kept))
    mix = Mix([fresh_share, replay])
    try:
        drawn = await buffer.sample(
            len(ids), mix, max_staleness=max_staleness, step=step, at_least=0
        )
    except CorruptPayloadError as error:
        drawn = _NOTHING if error.batch is None else error.batch
    return _arranged(drawn, ids, kept, filtered)


def _verdicts(
    groups: Sequence[EpisodeGroup],
    tolerance: float,
    informative: Callable[[EpisodeGroup], bool | np.bool_] | None,
) -> list[bool]:
    if informative is None:
        return [is_informative(group, tolerance) for group in groups]
    return [
        checks.flag(f"informative(groups[{i}])", informative(group))
        for i, group in enumerate(groups)
    ]


_NOTHING: Batch = Batch([])


def _arranged(drawn: Batch, ids: list[int], kept: list[int], filtered: list[int]) -> Replacement:
    """Put the drawn groups where the fresh ones were."""
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
        missing=[place for place, group_id in enumerate(chosen) if group_id is None],
    )


def _filtered(group: EpisodeGroup, reason: str) -> EpisodeGroup:
    filtered = copy(group)
    filtered.status = GroupStatus.FILTERED
    filtered.tags = {**group.tags, REASON_TAG: reason}
    return filtered
