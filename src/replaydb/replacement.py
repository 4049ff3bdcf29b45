"""Replay in the place of groups that teach nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from sqlalchemy import ColumnElement

from replaydb import checks
from replaydb.batch.batch import Batch
from replaydb.buffer import Buffer
from replaydb.database.group_columns import col
from replaydb.episodes import EpisodeGroup, GroupStatus
from replaydb.errors import CorruptPayloadError, NotEnoughGroupsError
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
        missing: Positions, among the fresh groups, that the batch has nothing for: the buffer had
            too few, or they were too stale, damaged, or taken by somebody else meanwhile.
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
    where: ColumnElement[bool] | None = None,
    max_staleness: int | None = None,
    priority: float | Callable[[EpisodeGroup], float] | None = None,
    step: int | None = None,
) -> Replacement:
    """Store fresh groups and draw a batch in which replay takes the place of uninformative ones.

    In a group whose rewards are all equal every group-relative advantage is 0 (the "dynamic
    sampling" of DAPO, Yu et al., 2025, generates more instead). All groups are stored, in one
    transaction: those as `filtered`, with a tag that says so. The batch is one recorded draw,
    which has the fresh groups first.
    Fresh groups never take the place of their neighbours. In a full buffer the informative ones
    make room for themselves, as in any put; the others push out nothing.

    Args:
        groups: Fresh groups of one step.
        buffer: Where they go, and replay comes from.
        policy: How stored groups are chosen.
        tolerance: Rewards that are this close are equal.
        where: Only stored groups that meet this expression over `replaydb.col` replace others.
        max_staleness: Only groups, fresh or stored, at most this many policy versions behind.
        priority: As for `Buffer.put`.
        step: The trainer step, for the record.

    Raises:
        DuplicateGroupError: A group is in the buffer already; nothing was stored.
        RateLimitedError: The buffer's rate limit does not let so many out; all were stored.
    """
    fresh = checks.instances("groups", groups, EpisodeGroup)
    if not fresh:
        return Replacement(_NOTHING, [], [], [], [])
    informative = [is_informative(group, tolerance) for group in fresh]
    ids = await buffer.put(
        [
            group if keep else _filtered(group, tolerance)
            for group, keep in zip(fresh, informative, strict=True)
        ],
        priority=priority,
    )
    kept = [one for one, keep in zip(ids, informative, strict=True) if keep]
    filtered = [one for one, keep in zip(ids, informative, strict=True) if not keep]
    # No group is in two shares, so what is fresh cannot be replayed at once.
    replay = col.reward_max - col.reward_min > tolerance
    mix = Mix(
        [
            Share(len(kept), Lifo(), where=col.id.in_(kept), minimum=len(kept)),
            Share(
                len(filtered),
                policy,
                where=replay if where is None else replay & where,
                minimum=len(filtered),
            ),
        ]
    )
    try:
        drawn = await buffer.sample(
            len(ids), mix, max_staleness=max_staleness, step=step, allow_partial=True
        )
    except NotEnoughGroupsError:
        drawn = _NOTHING
    except CorruptPayloadError as error:
        drawn = _NOTHING if error.batch is None else error.batch
    return _arranged(drawn, ids, kept, filtered)


_NOTHING: Batch = Batch([])


def _arranged(drawn: Batch, ids: list[int], kept: list[int], filtered: list[int]) -> Replacement:
    """Put the drawn groups where the fresh ones were."""
    position = {one: i for i, one in enumerate(drawn.ids)}
    others = iter([one for one in drawn.ids if one not in set(ids)])
    chosen = [one if one in position else next(others, None) for one in ids]
    order = [position[one] for one in chosen if one is not None]
    batch = Batch(
        [drawn[i] for i in order],
        drawn.probabilities[order],
        drawn.weights[order],
        drawn.draw_id,
    )
    return Replacement(
        batch=batch,
        fresh_ids=[one for one in kept if one in position],
        filtered_ids=filtered,
        replayed_ids=[one for one in batch.ids if one not in set(ids)],
        missing=[place for place, one in enumerate(chosen) if one is None],
    )


def _filtered(group: EpisodeGroup, tolerance: float) -> EpisodeGroup:
    return EpisodeGroup(
        group.task_name,
        group.episodes,
        prompt_uid=group.prompt_uid,
        group_uid=group.group_uid,
        priority=group.priority,
        status=GroupStatus.FILTERED,
        tags={**group.tags, REASON_TAG: f"rewards within {tolerance:g} of each other"},
        expected_episodes=group.expected_episodes,
    )
