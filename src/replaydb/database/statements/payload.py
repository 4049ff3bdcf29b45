"""Statements on episodes, payload parts and texts of groups."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import Delete, Select, delete, select

from replaydb.database.runtime.prepared import Bound, prepared
from replaydb.database.tables.expressions import among
from replaydb.database.tables.schema import CONTEXT_PART, episode, pack, payload, transcript

#: Name of the pack of a part, read by the key of the pack.
NAME_OF_PACK = (
    select(pack.c.name).where(pack.c.id == payload.c.pack_id).scalar_subquery().label("pack")
)


@prepared
def _select_every_part(ids: Any) -> Select[Any]:
    """Select the payload parts of groups. Those in packs have the pack's name as `pack`."""
    return select(payload, NAME_OF_PACK).where(among(payload.c.group_id, ids))


@prepared
def _select_parts(ids: Any, fields: Any) -> Select[Any]:
    """Select the payload parts of groups, of those with columns only the ones in `fields`."""
    wanted = (payload.c.part >= CONTEXT_PART) | among(payload.c.field, fields)
    return select(payload, NAME_OF_PACK).where(among(payload.c.group_id, ids), wanted)


def select_payloads(ids: Sequence[int], fields: Collection[str] | None) -> Bound[Select[Any]]:
    """Return the statement that selects the parts of groups, of columns only those in `fields`."""
    if fields is None:
        return _select_every_part(ids)
    return _select_parts(ids, sorted(fields))


def select_episodes(ids: Sequence[int]) -> Select[Any]:
    """Select the columns from which scalars of groups are computed, in order of the episodes."""
    columns = (
        episode.c.group_id,
        episode.c.reward,
        episode.c.num_tokens,
        episode.c.min_policy_version,
        episode.c.max_policy_version,
    )
    return (
        select(*columns)
        .where(among(episode.c.group_id, ids))
        .order_by(episode.c.group_id, episode.c.position)
    )


@prepared
def delete_payloads(ids: Any) -> Delete:
    """Delete the payloads of groups."""
    return delete(payload).where(among(payload.c.group_id, ids))


@prepared
def delete_transcripts(ids: Any) -> Delete:
    """Delete the texts of groups."""
    return delete(transcript).where(among(transcript.c.group_id, ids))
