"""Statements on recorded draws and the outcomes of their groups."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, Delete, Update, delete, select, update

from replaydb.database.runtime.prepared import prepared
from replaydb.database.tables.expressions import among
from replaydb.database.tables.schema import IS_LEASED, draw, draw_group

_drawn = draw_group.c

#: Groups of a draw that are still leased. Once there are none, there will never be any.
LEASED = select(draw_group.c.group_id).where(draw_group.c.draw_id == draw.c.id, IS_LEASED)


def set_outcome(which: ColumnElement[bool], outcome: Any, reason: Any, now: Any) -> Update:
    """Record an outcome of drawn groups."""
    values = {_drawn.outcome: outcome, _drawn.outcome_reason: reason, _drawn.outcome_at: now}
    return update(draw_group).where(which).values(values)


@prepared
def delete_draws(ids: Any) -> Delete:
    """Delete draws with the records of their groups. Draws locked by others are skipped."""
    mine = select(draw.c.id).where(among(draw.c.id, ids)).with_for_update(skip_locked=True)
    return delete(draw).where(draw.c.id.in_(mine))
