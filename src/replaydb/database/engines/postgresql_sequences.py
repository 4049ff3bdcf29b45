"""Sequences of PostgreSQL that generate ids, and errors about keys that rows already have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import (
    BigInteger,
    BindParameter,
    Boolean,
    ColumnElement,
    Connection,
    Integer,
    PrimaryKeyConstraint,
    Select,
    UniqueConstraint,
    any_,
    case,
    cast,
    column,
    func,
    schema,
    select,
    table,
)
from sqlalchemy.dialects.postgresql import ARRAY, REGCLASS

from replaydb.database.prepared import execute, prepared
from replaydb.database.schema import GENERATED, episode_group, metadata

UNIQUE_VIOLATION = "23505"

_GENERATED_KEYS = {one.primary_key.name for one in GENERATED}
#: Keys that callers choose, which another transaction may take first. A sequence gives each id to
#: one transaction: if a row has it already, the sequence is behind, and a retry would only hide it.
_CHOSEN_KEYS = {
    key.name
    for one in metadata.tables.values()
    for key in one.constraints
    if isinstance(key, PrimaryKeyConstraint | UniqueConstraint)
} - _GENERATED_KEYS


def _sequence_of(name: str) -> str:
    """The sequence that BIGSERIAL makes for the ids of a table."""
    return f"{name}_id_seq"


def _last_id(name: str) -> ColumnElement[int]:
    last, is_called = column("last_value", BigInteger()), column("is_called", Boolean())
    sequence = table(_sequence_of(name), last, is_called)
    # Until it is called, its value is the first id that it will generate.
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


def last_ids(connection: Connection) -> dict[str, int | None]:
    """Return the last id that each sequence has generated, of those that the user may read."""
    [readable] = execute(connection, _READABLE)
    names = [name for name, is_readable in readable._asdict().items() if is_readable]
    if not names:
        return {}
    [found] = execute(connection, select(*(_LAST_IDS[name] for name in names)))
    return dict(found._asdict())


def advance(connection: Connection, ids: Mapping[str, int]) -> None:
    """Let sequences continue after ids, by table, unless they are past them."""
    for name, value in ids.items():
        # One statement: other transactions may use the sequence meanwhile.
        setval = func.setval(cast(_sequence_of(name), REGCLASS), value)
        connection.execute(select(setval).where(_LAST_IDS[name] < value))


@prepared
def new_group_ids(count: BindParameter[int]) -> Select[Any]:
    """Generated `ids` for groups, and whether a group has one of them (`is_taken`).

    As an array: with a row for each the planner would read the whole table for many of them.
    """
    ids = func.array_agg(_GROUP_IDS.next_value(), type_=ARRAY(BigInteger)).label("ids")
    new = select(ids).select_from(func.generate_series(1, cast(count, Integer))).subquery("new")
    is_taken = select(episode_group.c.id).where(episode_group.c.id == any_(new.c.ids)).exists()
    return select(new.c.ids, is_taken.label("is_taken"))


def is_race(error: BaseException | None) -> bool:
    """Whether a unique violation may be about a key that another transaction has just taken."""
    return _violated(error)[1] in _CHOSEN_KEYS


def explain(error: BaseException | None) -> str:
    """Say what to do about a unique violation that retries do not help with."""
    name, constraint = _violated(error)
    if constraint in _GENERATED_KEYS:
        return explain_behind(name)
    return (
        f"table {name}: {error}, and retries do not help; run `replaydb doctor`, which finds "
        "constraints that are not replaydb's, and `replaydb verify`"
    )


def explain_behind(name: str | None) -> str:
    """Say what to do about a sequence that generates ids that rows have."""
    return (
        f"the sequence of table {name} is behind its rows and generates ids that these have; "
        "run `replaydb verify --repair`"
    )


def _violated(error: BaseException | None) -> tuple[str | None, str | None]:
    """The table and the constraint that an error of the driver is about."""
    cause = getattr(error, "__cause__", None) or error
    return getattr(cause, "table_name", None), getattr(cause, "constraint_name", None)
