"""Compilation of the expressions of `expressions.py` for SQLite."""

from __future__ import annotations

from typing import Any

from sqlalchemy.ext.compiler import compiles
from sqlalchemy.schema import ExecutableDDLElement
from sqlalchemy.sql.compiler import DDLCompiler, SQLCompiler

from replaydb.database.tables.expressions import (
    among,
    as_stored,
    bytewise,
    comes_after,
    comes_before,
    compile_as,
    in_turn,
    joined,
    json_as_stored,
    json_boolean,
    json_double,
    json_integer,
    json_kind,
    json_part,
    json_text,
    matches,
    next_draw_id,
    seconds_between,
    server_time,
)


class set_user_version(ExecutableDDLElement):
    """`PRAGMA user_version`, which takes no bound parameter."""

    def __init__(self, version: int) -> None:
        self.version = version


@compiles(set_user_version, "sqlite")
def _compile_set_user_version(element: set_user_version, compiler: DDLCompiler, **kw: Any) -> str:
    return f"PRAGMA user_version = {int(element.version)}"


compile_as(
    "sqlite",
    {
        among: "{0} IN (SELECT value FROM json_each({1}))",
        # Each column is compared. In a row comparison, SQLite uses no index for the rowid.
        comes_after: "({0} = {1} AND {2} > {3})",
        comes_before: "({0} = {1} AND {2} < {3})",
        as_stored: "CAST({0} AS BLOB)",
        json_as_stored: "CAST({0} AS BLOB)",
        server_time: "NULL",
        next_draw_id: "NULL",
        in_turn: "1",
        joined: "group_concat({0})",
        seconds_between: "((julianday({1}) - julianday({0})) * 86400.0)",
        matches: "({0} GLOB {1})",
        bytewise: "{0}",
    },
)


@compiles(json_part, "sqlite")
def _compile_json_part(element: json_part, compiler: SQLCompiler, **kw: Any) -> str:
    """Use json_each, whose keys are unescaped: paths of json_extract cannot name every key.

    Invalid JSON has no parts. It does not make the query fail.
    """
    column, *steps = (compiler.process(clause, **kw) for clause in element.clauses)
    tables = [f"json_each(CASE WHEN json_valid({column}) THEN {column} END) AS part_0"]
    for depth in range(len(steps) - 1):
        inside = f"CASE WHEN part_{depth}.type IN ('object', 'array') THEN part_{depth}.value END"
        tables.append(f"json_each({inside}) AS part_{depth + 1}")
    conditions = [f"part_{depth}.key = {step}" for depth, step in enumerate(steps)]
    value, condition = _JSON_KINDS[type(element)]
    last = f"part_{len(steps) - 1}"
    where = " AND ".join([*conditions, condition.format(last)])
    return f"(SELECT {value.format(last)} FROM {', '.join(tables)} WHERE {where})"  # noqa: S608


#: For each kind, the value from a row of `json_each` and the condition that it has the kind.
_JSON_KINDS = {
    json_text: ("{}.value", "{}.type = 'text'"),
    json_integer: ("{0}.value", "{0}.type = 'integer' AND typeof({0}.value) = 'integer'"),
    json_double: ("CAST({}.value AS REAL)", "{}.type IN ('integer', 'real')"),
    json_boolean: ("{}.value", "{}.type IN ('true', 'false')"),
    json_kind: ("{}.type", "{}.type <> 'null'"),
}
