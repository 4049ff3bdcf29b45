"""PostgreSQL sequences that generate ids, and the explanation of unique violations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from sqlalchemy import (
    BigInteger,
    BindParameter,
    Boolean,
    ColumnElement,
    PrimaryKeyConstraint,
    Select,
    String,
    UniqueConstraint,
    any_,
    bindparam,
    case,
    cast,
    column,
    func,
    insert,
    schema,
    select,
    table,
    true,
)
from sqlalchemy.dialects.postgresql import ARRAY, REGCLASS
from sqlalchemy.sql.elements import Grouping

from replaydb.database.postgresql.combined_writes import Part, numbered, rows_of
from replaydb.database.runtime.prepared import Bound, Write
from replaydb.database.runtime.session import Session
from replaydb.database.tables.schema import (
    GENERATED,
    draw,
    draw_group,
    episode_group,
    group,
    metadata,
)

UNIQUE_VIOLATION = "23505"

#: Keys with generated ids, and the tables whose sequence generates them. A draw and its groups are
#: written in one statement, which may find the id of the draw taken in either table.
_GENERATED_KEYS = {one.primary_key.name: one.name for one in GENERATED} | {
    draw_group.primary_key.name: draw.name
}
#: Keys that callers choose, which another transaction may use first. In contrast, a sequence never
#: generates an id twice: if a row has it already, the sequence is behind, and a retry would hide
#: that.
_CHOSEN_KEYS = {
    key.name
    for one in metadata.tables.values()
    for key in one.constraints
    if isinstance(key, PrimaryKeyConstraint | UniqueConstraint)
} - _GENERATED_KEYS.keys()


def _sequence_of(name: str) -> str:
    """Return the name of the sequence that BIGSERIAL creates for the ids of a table."""
    return f"{name}_id_seq"


def _last_id(name: str) -> ColumnElement[int]:
    last, is_called = column("last_value", BigInteger()), column("is_called", Boolean())
    sequence = table(_sequence_of(name), last, is_called)
    # Before the first call, `last_value` is the first id that the sequence will generate.
    return select(case((is_called, last), else_=last - 1)).select_from(sequence).scalar_subquery()


_LAST_IDS = {one.name: _last_id(one.name).label(one.name) for one in GENERATED}
_READABLE = select(
    *(
        func.has_sequence_privilege(func.to_regclass(_sequence_of(one.name)), "SELECT").label(
            one.name
        )
        for one in GENERATED
    )
)
_GROUP_IDS = schema.Sequence(_sequence_of(episode_group.name), data_type=BigInteger)


def last_ids(session: Session) -> dict[str, int | None]:
    """Return the last generated id of each table whose sequence the user may read.

    Sequences are not transactional, so they are never behind the ids of a snapshot.
    """
    [readable] = session.run(_READABLE)
    names = [name for name, is_readable in readable._asdict().items() if is_readable]
    if not names:
        return {}
    [found] = session.run(select(*(_LAST_IDS[name] for name in names)))
    return dict(found._asdict())


def advance(session: Session, ids: Mapping[str, int]) -> None:
    """Let sequences continue after these ids, by table, unless they are past them."""
    for name, value in ids.items():
        # In one statement, because other transactions use the sequence at the same time.
        setval = func.setval(cast(_sequence_of(name), REGCLASS), value)
        session.run(select(setval).where(_LAST_IDS[name] < value))


def identify_groups(
    buffer_id: int, uids: Sequence[str], children: Sequence[Write] = ()
) -> Bound[Select[Any]]:
    """Select the groups that have these uids, generate as many new ids, and insert rows of groups.

    The columns are `known_uids` and `known_ids`, `ids`, and whether a group already has one of the
    new ids (`is_taken`). The ids are an array. With a row for each, the planner would scan the
    whole table if there are many.

    Args:
        buffer_id: Id of the buffer.
        uids: Uids of groups.
        children: Rows to insert for those groups that are not stored yet, unless one of the new ids
            is taken. Instead of `group_id` they have the position of the uid, from 1.
    """
    parts = tuple(Part(write.statement, tuple(write.rows[0])) for write in children)
    values = {"buffer_id": buffer_id, "uids": uids}
    for number, write in enumerate(children):
        values |= numbered(number, write.columns)
    return Bound(_identify_groups(parts), values)


@lru_cache(maxsize=64)
def _identify_groups(parts: tuple[Part, ...]) -> Select[Any]:
    buffer_id: BindParameter[int] = bindparam("buffer_id")
    uids: BindParameter[Any] = bindparam("uids")
    stored = _stored(buffer_id, uids).cte("stored")
    known = select(
        func.array_agg(stored.c.group_uid, type_=ARRAY(String)).label("known_uids"),
        func.array_agg(stored.c.id, type_=ARRAY(BigInteger)).label("known_ids"),
    ).subquery("known")
    count = func.cardinality(cast(uids, ARRAY(String)))
    ids = func.array_agg(_GROUP_IDS.next_value(), type_=ARRAY(BigInteger)).label("ids")
    generated = select(ids).select_from(func.generate_series(1, count)).cte("generated")
    taken = select(episode_group.c.id).where(episode_group.c.id == any_(generated.c.ids)).exists()
    new = select(generated.c.ids, taken.label("is_taken")).cte("new")
    statement = select(known, new).select_from(known.join(new, true()))
    for number, part in enumerate(parts):
        rows = rows_of(number, part)
        position = rows.c.group_id
        uid = Grouping(cast(uids, ARRAY(String)))[position]
        values = [
            new.c.ids[position] if name == position.name else rows.c[name] for name in part.names
        ]
        is_fresh = ~new.c.is_taken & uid.not_in(select(stored.c.group_uid))
        fresh = select(*values).select_from(rows.join(new, true())).where(is_fresh)
        added = insert(part.statement.table).from_select(list(part.names), fresh)
        statement = statement.add_cte(added.cte(f"write_{number}"))
    return statement


def _stored(buffer_id: Any, uids: Any) -> Select[Any]:
    """Select the uids and ids of groups that have these uids.

    Each is one lookup in the index of uids, whose order it requests. Without statistics, the
    planner would rather read all groups of a buffer than look up many uids.
    """
    wanted = func.unnest(cast(uids, ARRAY(String))).table_valued("uid").render_derived("wanted")
    one = select(group.group_uid, group.id).where(
        group.buffer_id == buffer_id, group.group_uid.between(wanted.c.uid, wanted.c.uid)
    )
    found = one.order_by(group.group_uid).limit(1).lateral("found")
    return select(found.c.group_uid, found.c.id).select_from(wanted.join(found, true()))


def is_race(error: BaseException | None) -> bool:
    """Whether a unique violation may be about a key that another transaction has just used."""
    return _violated(error)[1] in _CHOSEN_KEYS


def explain(error: BaseException | None, text: str) -> str:
    """Return the message for a unique violation that is not retried, or not again."""
    name, constraint = _violated(error)
    if constraint in _GENERATED_KEYS:
        return explain_behind(_GENERATED_KEYS[constraint])
    if constraint in _CHOSEN_KEYS:
        return (
            f"table {name}: {text}: another transaction stored the same key first, in each "
            "attempt. Repeat the call; if the error remains, run `replaydb verify`"
        )
    return (
        f"table {name}: {text}, and a retry does not resolve it; run `replaydb doctor`, which "
        "finds constraints that are not replaydb's, and `replaydb verify`"
    )


def explain_behind(name: str | None) -> str:
    """Return the message for a sequence that generates ids that rows already have."""
    return (
        f"the sequence of table {name} is behind its rows and generates ids that they already "
        "have; run `replaydb verify --repair`"
    )


def _violated(error: BaseException | None) -> tuple[str | None, str | None]:
    """Return the table and the constraint of a unique violation."""
    cause = getattr(error, "__cause__", None) or error
    return getattr(cause, "table_name", None), getattr(cause, "constraint_name", None)
