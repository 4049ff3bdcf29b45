"""`replaydb.col`: the columns of groups that filters may use.

Columns that only draws and leases use, such as sampling keys and weights, are excluded.
"""

from __future__ import annotations

from datetime import datetime
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from sqlalchemy import Column

from replaydb.database.tables.schema import episode_group

_c = episode_group.c


class GroupColumns:
    """Columns of groups for filters, such as `rdb.col.reward_std > 0.1`.

    A comparison returns a condition for `where=`. Join conditions with `&` and `|`, and negate them
    with `~`. `docs/filters.md` lists everything that a filter may contain. A column without a value
    for a group is None, such as the mean reward of a group without rewards.

    Raises:
        AttributeError: There is no such column, or filters cannot use it.
    """

    __slots__ = ()

    id: Column[int] = _c.id
    """Id of the group, assigned when it was put; later groups have higher ids."""
    run_id: Column[int] = _c.run_id
    """Id of the run that put the group. To filter by name, use `runs=`."""
    group_uid: Column[str] = _c.group_uid
    """Uid given when the group was put, or a random one; unique in the buffer."""
    prompt_uid: Column[str] = _c.prompt_uid
    """Name of the prompt, shared by all groups that were generated from it."""
    task_name: Column[str] = _c.task_name
    """Task of the group."""
    group_status: Column[str] = _c.group_status
    """Status: a `GroupStatus`, or its value as text."""
    status_reason: Column[str] = _c.status_reason
    """Why the group has its status, if a reason was given."""
    staleness: Column[int] = _c.staleness
    """The buffer's policy version minus `comparable_version`."""
    min_policy_version: Column[int] = _c.min_policy_version
    """Oldest policy version that generated a token."""
    max_policy_version: Column[int] = _c.max_policy_version
    """Newest policy version that generated a token."""
    comparable_version: Column[int] = _c.comparable_version
    """`min_policy_version` if the group's run is of the lineage that the buffer follows."""
    priority: Column[float] = _c.priority
    """Priority that was last set."""
    times_sampled: Column[int] = _c.times_sampled
    """Number of draws of the group, without those that released it unused."""
    times_replaced: Column[int] = _c.times_replaced
    """How often the content of the group was replaced."""
    times_annotated: Column[int] = _c.times_annotated
    """How often values were added to its content, or changed, by `Buffer.annotate`."""
    attempts: Column[int] = _c.attempts
    """Number of leases of the group that ended with a nack or expired."""
    lease_id: Column[int] = _c.lease_id
    """Id of the lease that holds the group."""
    leased_from: Column[str] = _c.leased_from
    """Status that the group was leased from."""
    num_episodes: Column[int] = _c.num_episodes
    """Number of episodes that have been added."""
    expected_episodes: Column[int] = _c.expected_episodes
    """Number of episodes that complete the group."""
    min_episodes: Column[int] = _c.min_episodes
    """Number of episodes that are enough when the deadline has passed."""
    num_tokens: Column[int] = _c.num_tokens
    """Number of tokens of all episodes, including prompts."""
    num_bytes: Column[int] = _c.num_bytes
    """Stored size of the episodes, in bytes."""
    reward_mean: Column[float] = _c.reward_mean
    """Mean reward of the episodes."""
    reward_std: Column[float] = _c.reward_std
    """Standard deviation of the rewards of the episodes."""
    reward_min: Column[float] = _c.reward_min
    """Lowest reward of an episode."""
    reward_max: Column[float] = _c.reward_max
    """Highest reward of an episode."""
    has_transcript: Column[bool] = _c.has_transcript
    """Whether an episode has text."""
    tags: Column[Any] = _c.tags
    """Tags of the group, a JSON object; `tags["level"]` selects a value."""
    deadline: Column[datetime] = _c.deadline
    """When a pending group is completed with the episodes it has, or fails."""
    created_at: Column[datetime] = _c.created_at
    """When the group was put, or opened."""
    completed_at: Column[datetime] = _c.completed_at
    """When the last of its episodes was added."""
    first_sampled_at: Column[datetime] = _c.first_sampled_at
    """When the group was first drawn."""
    last_sampled_at: Column[datetime] = _c.last_sampled_at
    """When the group was last drawn."""
    archived_at: Column[datetime] = _c.archived_at
    """When the group was archived."""

    def __repr__(self) -> str:
        return "replaydb.col"

    def __dir__(self) -> list[str]:
        return sorted(COLUMNS)

    if not TYPE_CHECKING:  # a type checker would accept any name as an attribute

        def __getattr__(self, name: str) -> Any:
            message = f"groups have no column {name!r}"
            if name in _c:
                message = f"filters cannot use the column {name!r}: it is internal"
            elif near := get_close_matches(name, COLUMNS, n=1):
                message += f"; did you mean {near[0]!r}?"
            raise AttributeError(message, obj=self)  # with `name`, Python would add its own guess


#: Every column that a filter may use, by name.
COLUMNS: dict[str, Column[Any]] = {
    name: value for name, value in vars(GroupColumns).items() if isinstance(value, Column)
}
col = GroupColumns()
