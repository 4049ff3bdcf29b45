"""PostgreSQL roles for analysts, writers and trainers, each with the privileges that it needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from sqlalchemy import Connection, String, cast, column, func, not_, or_, select, table
from sqlalchemy.dialects.postgresql import REGCLASS
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.schema import ExecutableDDLElement
from sqlalchemy.sql.compiler import DDLCompiler

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
    "lease": {"INSERT": (), "UPDATE": (), "DELETE": ()},
    "episode_group": {"UPDATE": (), "DELETE": ()},
    "payload": {"DELETE": ()},
    "transcript": {"DELETE": ()},
    "episode": {"DELETE": ()},
    "group_tag": {"INSERT": (), "DELETE": ()},
    "draw": {"UPDATE": ("step",), "DELETE": ()},
    "draw_group": {
        "UPDATE": (
            *("outcome", "outcome_reason", "outcome_at"),
            *("task_name", "prompt_uid", "group_run_id", "reward_mean", "reward_std"),
            *("min_policy_version", "max_policy_version", "num_tokens"),
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
        {"task": {"INSERT": (), "DELETE": ()}},  # a new one that only a refused put names
    ),
    "trainer": (
        _MAINTENANCE,
        {"buffer": {"UPDATE": ("policy_version", "policy_lineage")}},
        {name: {"INSERT": ()} for name in ("draw", "draw_group", "policy_change")},
    ),
}


class create_role(ExecutableDDLElement):
    """Create a role that cannot log in. Users become members of it."""

    def __init__(self, name: str) -> None:
        self.name = name


class revoke_all(ExecutableDDLElement):
    """Revoke all privileges of a role on the tables of a schema."""

    def __init__(self, schema: str, role: str) -> None:
        self.schema = schema
        self.role = role


class grant_schema(ExecutableDDLElement):
    """Let a role use a schema."""

    def __init__(self, schema: str, role: str) -> None:
        self.schema = schema
        self.role = role


class grant_ids(ExecutableDDLElement):
    """Let a role read sequences (SELECT), or generate ids for the rows it inserts (USAGE)."""

    def __init__(self, privilege: Literal["SELECT", "USAGE"], schema: str, role: str) -> None:
        self.privilege = privilege
        self.schema = schema
        self.role = role


class grant(ExecutableDDLElement):
    """Grant a role a privilege on a table, or on some of its columns."""

    def __init__(
        self, privilege: Privilege, columns: Sequence[str], table_name: str, role: str
    ) -> None:
        self.privilege = privilege
        self.columns = columns
        self.table_name = table_name
        self.role = role


@compiles(create_role, "postgresql")
def _create_role(element: create_role, compiler: DDLCompiler, **kw: Any) -> str:
    return f"CREATE ROLE {compiler.preparer.quote(element.name)} NOLOGIN"


@compiles(revoke_all, "postgresql")
def _revoke_all(element: revoke_all, compiler: DDLCompiler, **kw: Any) -> str:
    schema, role = map(compiler.preparer.quote, (element.schema, element.role))
    return f"REVOKE ALL ON ALL TABLES IN SCHEMA {schema} FROM {role}"


@compiles(grant_schema, "postgresql")
def _grant_schema(element: grant_schema, compiler: DDLCompiler, **kw: Any) -> str:
    schema, role = map(compiler.preparer.quote, (element.schema, element.role))
    return f"GRANT USAGE ON SCHEMA {schema} TO {role}"


@compiles(grant_ids, "postgresql")
def _grant_ids(element: grant_ids, compiler: DDLCompiler, **kw: Any) -> str:
    schema, role = map(compiler.preparer.quote, (element.schema, element.role))
    return f"GRANT {element.privilege} ON ALL SEQUENCES IN SCHEMA {schema} TO {role}"


@compiles(grant, "postgresql")
def _grant(element: grant, compiler: DDLCompiler, **kw: Any) -> str:
    quote = compiler.preparer.quote
    columns = f" ({', '.join(map(quote, element.columns))})" if element.columns else ""
    table_name, role = quote(element.table_name), quote(element.role)
    return f"GRANT {element.privilege}{columns} ON {table_name} TO {role}"


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
            yield create_role(role)
        yield revoke_all(schema, role)
        yield grant_schema(schema, role)
        yield grant_ids("SELECT", schema, role)
        if rights:
            yield grant_ids("USAGE", schema, role)
        for name in tables:
            yield grant("SELECT", (), name, role)
        for part in rights:
            for name, privileges in part.items():
                for privilege, columns in privileges.items():
                    yield grant(privilege, columns, name, role)
