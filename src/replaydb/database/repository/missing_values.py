"""Pending groups whose episodes lack values that the settings require."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from sqlalchemy import Delete, Select, Text, cast, delete, select

from replaydb.database.repository.locked import LockedBuffer
from replaydb.database.runtime.prepared import prepared
from replaydb.database.tables.expressions import among
from replaydb.database.tables.schema import episode_group, group, trajectory
from replaydb.domain.annotations import has_value

_this = trajectory.c


def rows_of(
    buffer: LockedBuffer, task_name: str, group_id: int, episodes: Iterable[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return a row of `trajectory` for each required value that an episode does not have.

    Args:
        buffer: The buffer.
        task_name: Task of the group.
        group_id: Id of the group.
        episodes: Columns of its episodes, with their positions.
    """
    required = buffer.settings.requires_of(task_name)
    return [
        {
            "group_id": group_id,
            "position": one["position"],
            "missing": name,
            "buffer_id": buffer.id,
        }
        for one in (episodes if required else ())
        for name in required
        if not has_value(name, one)
    ]


def limits(buffer: LockedBuffer) -> dict[str, Any]:
    """Return the columns of groups that begin to wait: their deadline, by the settings."""
    seconds = buffer.settings.requires_timeout
    return {} if seconds is None else {"deadline": buffer.now + timedelta(seconds=seconds)}


def described(missing: Sequence[str], num_episodes: int) -> str:
    """Return which values a group lacks, such as "reward of 3 of 8 episodes".

    Args:
        missing: Name of each value that an episode lacks.
        num_episodes: Number of episodes of the group.
    """
    names = sorted(set(missing))
    return ", ".join(
        f"{name} of {missing.count(name)} of {num_episodes} episodes" for name in names
    )


@prepared
def select_missing(buffer_id: Any, uids: Any) -> Select[Any]:
    """Select what episodes of groups lack, by uid of the group, and their open trajectories."""
    return (
        select(trajectory)
        .join_from(episode_group, trajectory, _this.group_id == group.id)
        .where(group.buffer_id == buffer_id, among(group.group_uid, uids))
        .order_by(_this.group_id, _this.position, _this.missing)
    )


def key_of(row: Any) -> str:
    """Return the key by which `delete_missing` finds a row."""
    return f"{row.group_id}/{row.position}/{row.missing}"


@prepared
def delete_missing(ids: Any, keys: Any) -> Delete:
    """Delete rows of groups: their episodes have these values now."""
    key = cast(_this.group_id, Text) + "/" + cast(_this.position, Text) + "/" + _this.missing
    return delete(trajectory).where(among(_this.group_id, ids), among(key, keys))
