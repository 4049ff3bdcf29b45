"""Values that drawn groups had before annotations changed them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Select, select

from replaydb import codec
from replaydb.batch.stored import StoredGroup
from replaydb.database.runtime.prepared import prepared
from replaydb.database.tables.expressions import among
from replaydb.database.tables.schema import OF_EPISODE, annotation, draw_group
from replaydb.domain.episodes.turns import set_fields


def undo(found: Mapping[int, StoredGroup], later: Sequence[Any]) -> None:
    """Give decoded groups the values that they had before some annotations, the last one first."""
    for row in later:
        group = found.get(row.group_id)
        if group is None:
            continue
        episode = group.episodes[group.positions.index(row.position)]
        if row.turn != OF_EPISODE and row.name == "reward":
            codec.late.restore(episode, row.turn, row.previous)
            continue
        target = episode if row.turn == OF_EPISODE else episode.turns[row.turn]
        if row.name != "metadata":
            set_fields(target, **{row.name: row.previous})
            continue
        before = {name: one["from"] for name, one in row.changes.items() if "from" in one}
        kept = {
            name: before.get(name, value)
            for name, value in target.metadata.items()
            if name in before or name not in row.changes
        }
        set_fields(target, metadata=kept)


@prepared
def select_later(draw_id: Any, ids: Any) -> Select[Any]:
    """Select the annotations of groups of a draw after it, the last one first."""
    drawn = draw_group.c
    return (
        select(annotation)
        .join_from(draw_group, annotation, annotation.c.group_id == drawn.group_id)
        .where(
            drawn.draw_id == draw_id,
            among(drawn.group_id, ids),
            annotation.c.number > drawn.times_annotated,
        )
        .order_by(annotation.c.group_id, annotation.c.number.desc())
    )
