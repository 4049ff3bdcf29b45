"""`replaydb.col`: the columns of groups that filters may use.

Left out is what only draws and leases understand: where groups stand in their order, and why.
"""

from __future__ import annotations

from datetime import datetime
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from sqlalchemy import Column

from replaydb.database.schema import episode_group

_c = episode_group.c


class GroupColumns:
    """What is known of every group, to be asked for in filters: `rdb.col.reward_std > 0.1`.

    A comparison gives a condition for `where=`; conditions are joined with `&`, `|` and `~`.
    `docs/filters.md` lists everything that filters can say. A column that has no value for a
    group, such as the mean reward of a group without rewards, is None there.

    Raises:
        AttributeError: There is no such column, or it is not for filters.
    """

    __slots__ = ()

    id: Column[int] = _c.id
    """Number that the group got when it was put; later ones are higher."""
    run_id: Column[int] = _c.run_id
    """Run that put the group. `runs=` takes runs by name."""
    group_uid: Column[str] = _c.group_uid
    """Name that the putter gave the group, or a random one; unique in the buffer."""
    prompt_uid: Column[str] = _c.prompt_uid
    """Name of the prompt, shared by all groups that were generated from it."""
    task_name: Column[str] = _c.task_name
    """Task of the group."""
    group_status: Column[str] = _c.group_status
    """Status: a `GroupStatus`, or its value as text."""
    status_reason: Column[str] = _c.status_reason
    """Why the group has its status, where that was said."""
    staleness: Column[int] = _c.staleness
    """The buffer's policy version minus `comparable_version`."""
    min_policy_version: Column[int] = _c.min_policy_version
    """Oldest policy version that made a token."""
    max_policy_version: Column[int] = _c.max_policy_version
    """Newest policy version that made a token."""
    comparable_version: Column[int] = _c.comparable_version
    """`min_policy_version`, where the run is of the lineage that the buffer follows."""
    priority: Column[float] = _c.priority
    """Priority, as it was last set."""
    times_sampled: Column[int] = _c.times_sampled
    """Number of draws that took the group, without those it was given back from."""
    times_replaced: Column[int] = _c.times_replaced
    """How often other content has taken the place of the group."""
    attempts: Column[int] = _c.attempts
    """Number of leases that ended with a nack, or ran out."""
    lease_id: Column[int] = _c.lease_id
    """Lease that holds the group."""
    leased_from: Column[str] = _c.leased_from
    """Status that the group was leased from."""
    num_episodes: Column[int] = _c.num_episodes
    """Number of episodes that have arrived."""
    expected_episodes: Column[int] = _c.expected_episodes
    """Number of episodes that complete the group."""
    min_episodes: Column[int] = _c.min_episodes
    """Number of episodes that are enough when the deadline has passed."""
    num_tokens: Column[int] = _c.num_tokens
    """Number of tokens of all episodes, those of the prompts included."""
    num_bytes: Column[int] = _c.num_bytes
    """Stored size of the episodes, in bytes."""
    reward_mean: Column[float] = _c.reward_mean
    """Mean of the rewards of the episodes."""
    reward_std: Column[float] = _c.reward_std
    """Standard deviation of the rewards of the episodes."""
    reward_min: Column[float] = _c.reward_min
    """Lowest reward of an episode."""
    reward_max: Column[float] = _c.reward_max
    """Highest reward of an episode."""
    has_transcript: Column[bool] = _c.has_transcript
    """Whether an episode has text."""
    tags: Column[Any] = _c.tags
    """JSON that the group was put with; `tags["level"]` is a part of it."""
    deadline: Column[datetime] = _c.deadline
    """When a group that arrives in pieces is no longer waited for."""
    created_at: Column[datetime] = _c.created_at
    """When the group was put, or opened."""
    completed_at: Column[datetime] = _c.completed_at
    """When the last of its episodes arrived."""
    first_sampled_at: Column[datetime] = _c.first_sampled_at
    """When the group was drawn for the first time."""
    last_sampled_at: Column[datetime] = _c.last_sampled_at
    """When the group was drawn for the last time."""
    archived_at: Column[datetime] = _c.archived_at
    """When the group was archived."""

    def __repr__(self) -> str:
        return "replaydb.col"

    def __dir__(self) -> list[str]:
        return sorted(COLUMNS)

    if not TYPE_CHECKING:  # a type checker would take it for an attribute of any name

        def __getattr__(self, name: str) -> Any:
            message = f"groups have no column {name!r}"
            if name in _c:
                message = f"the column {name!r} is not for filters: only draws and leases use it"
            elif near := get_close_matches(name, COLUMNS, n=1):
                message += f"; did you mean {near[0]!r}?"
            raise AttributeError(message, obj=self)  # without `name`, or Python guesses once more


#: Every column that a filter may use, by name.
COLUMNS: dict[str, Column[Any]] = {
    name: value for name, value in vars(GroupColumns).items() if isinstance(value, Column)
}
col = GroupColumns()
