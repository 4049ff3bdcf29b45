"""PostgreSQL roles for analysts, writers and trainers, each with the privileges that it needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from sqlalchemy import Connection, String, cast, column, func, not_, or_, select, table
from sqlalchemy.dialects.postgresql import REGCLASS
from sqlalchemy.schema import ExecutableDDLElement

from replaydb.database.postgresql.sql import command

Privilege = Literal["SELECT", "INSERT", "UPDATE", "DELETE"]
#: For each privilege on a table its columns; an empty sequence means all columns.
Rights = Mapping[str, Mapping[Privilege, Sequence[str]]]

#: Every process that writes does maintenance: it ends expired leases and deadlines, expires and
#: evicts groups, and trims history. A row lock requires the UPDATE privilege on a column. Every
#: write transaction writes to `commit_proof`.
_MAINTENANCE: Rights = {
    "run": {"INSERT": ()},
    "buffer": {"UPDATE": ("limited_inserts", "limited_samples", "pending_tags")},
    "task": {"UPDATE": ()},
    "lease": {"UPDATE": (), "DELETE": ()},
    "episode_group": {"UPDATE": (), "DELETE": ()},
    "payload": {"DELETE": ()},
    "transcript": {"DELETE": ()},
    "episode": {"DELETE": ()},
    "trajectory": {"UPDATE": ()},
    "group_tag": {"INSERT": (), "DELETE": ()},
    "draw": {"UPDATE": ("step",), "DELETE": ()},
    "draw_group": {
        "UPDATE": (
            *("outcome", "outcome_reason", "outcome_at"),
            *("task_name", "prompt_uid", "group_run_id", "reward_mean", "reward_std"),
            *("min_policy_version", "max_policy_version", "num_tokens", "times_annotated"),
        ),
        "DELETE": (),
    },
    "pack": {"UPDATE": (), "DELETE": ()},
    "cursor": {"INSERT": (), "UPDATE": ()},
    "commit_proof": {"INSERT": (), "UPDATE": (), "DELETE": ()},
}

#: Privileges of the roles in addition to reading, by the suffix of their names.
RIGHTS: Mapping[str, Sequence[Rights]] = {
    "analyst": (),
    "writer": (
        _MAINTENANCE,
        {
            name: {"INSERT": ()}
            for name in ("episode_group", "payload", "transcript", "episode", "pack")
        },
        {"trajectory": {"INSERT": (), "DELETE": ()}},
        {"turn": {"INSERT": (), "UPDATE": ("is_discarded", "reward", "metadata"), "DELETE": ()}},
        {"episode": {"UPDATE": ("reward", "advantage", "metadata")}, "annotation": {"INSERT": ()}},
        {"task": {"INSERT": (), "DELETE": ()}},  # a new one that only a refused put names
    ),
    "trainer": (
        _MAINTENANCE,
        {"buffer": {"UPDATE": ("policy_version", "policy_lineage")}},
        {name: {"INSERT": ()} for name in ("lease", "draw", "draw_group", "policy_change")},
    ),
}


_NAME = column("rolname", String())
_roles = table("pg_roles", _NAME, column("oid"))
_ROLES = select(_NAME).select_from(_roles)
_relations = table("pg_class", column("oid"), column("relname", String()), column("relowner"))


def problem(connection: Connection, prefix: str, tables: Sequence[str]) -> str | None:
    """Return why the user may not grant privileges on the tables and their schema; None: may.

    The server would run the statements all the same, with only a warning, if the user has one of
    the privileges.
    """
    owner = func.pg_get_userbyid(_relations.c.relowner)
    others = select(_relations.c.relname, owner, func.current_user()).where(
        _relations.c.oid.in_([cast(name, REGCLASS) for name in tables]),
        not_(func.pg_has_role(_relations.c.relowner, "USAGE")),
    )
    if found := connection.execute(others.order_by(_relations.c.relname)).first():
        name, owner_name, user = found
        return (
            f"roles are applied by the owner of the tables: {name} belongs to {owner_name!r}, and "
            f"{user!r} is not a member of that role"
        )
    schema = func.current_schema()
    names = [f"{prefix}_{ending}" for ending in RIGHTS]
    usable = func.has_schema_privilege(_roles.c.oid, schema, "USAGE")
    numbers = select(func.count()).select_from(_roles).where(_NAME.in_(names), usable)
    may = or_(
        func.has_schema_privilege(schema, "USAGE WITH GRANT OPTION"),
        func.has_schema_privilege("public", schema, "USAGE"),
        numbers.scalar_subquery() == len(names),
    )
    if found := connection.execute(select(schema, func.current_user()).where(not_(may))).first():
        return f"{found[1]!r} may not grant USAGE on schema {found[0]!r}; its owner may"
    return None


def statements(
    connection: Connection, prefix: str, tables: Sequence[str]
) -> Iterator[ExecutableDDLElement]:
    """Yield the statements that create the roles or update their privileges.

    Args:
        connection: To read the existing roles and the current schema.
        prefix: Prefix of the names of the roles.
        tables: Names of tables and views that all roles may read.
    """
    known = set(connection.scalars(_ROLES))
    schema = str(connection.scalar(select(func.current_schema())))
    for ending, rights in RIGHTS.items():
        role = f"{prefix}_{ending}"
        if role not in known:
            yield command("CREATE ROLE {} NOLOGIN", role)  # users become members of it
        yield command("REVOKE ALL ON ALL TABLES IN SCHEMA {} FROM {}", schema, role)
        yield command("GRANT USAGE ON SCHEMA {} TO {}", schema, role)
        yield command("GRANT SELECT ON ALL SEQUENCES IN SCHEMA {} TO {}", schema, role)
        if rights:  # to generate ids for rows
            yield command("GRANT USAGE ON ALL SEQUENCES IN SCHEMA {} TO {}", schema, role)
        for name in tables:
            yield _grant("SELECT", (), name, role)
        for part in rights:
            for name, privileges in part.items():
                for privilege, columns in privileges.items():
                    yield _grant(privilege, columns, name, role)


def _grant(privilege: Privilege, columns: Sequence[str], table_name: str, role: str) -> command:
    """Grant a role a privilege on a table, or on some of its columns."""
    some = f" ({', '.join('{}' for _ in columns)})" if columns else ""
    return command(f"GRANT {privilege}{some} ON {{}} TO {{}}", *columns, table_name, role)
