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


@compiles(among, "sqlite")
def _compile_among(element: among, compiler: SQLCompiler, **kw: Any) -> str:
    left, values = (compiler.process(clause, **kw) for clause in element.clauses)
    return f"{left} IN (SELECT value FROM json_each({values}))"  # noqa: S608 - compiled clauses


@compiles(comes_after, "sqlite")
def _compile_comes_after(element: comes_after, compiler: SQLCompiler, **kw: Any) -> str:
    """Compare each column. In a row comparison, SQLite uses no index for the rowid."""
    column, value, id_column, last = (compiler.process(one, **kw) for one in element.clauses)
    return f"({column} = {value} AND {id_column} > {last})"


@compiles(comes_before, "sqlite")
def _compile_comes_before(element: comes_before, compiler: SQLCompiler, **kw: Any) -> str:
    column, value, id_column, last = (compiler.process(one, **kw) for one in element.clauses)
    return f"({column} = {value} AND {id_column} < {last})"


@compiles(as_stored, "sqlite")
def _compile_as_stored(element: as_stored, compiler: SQLCompiler, **kw: Any) -> str:
    return f"CAST({compiler.process(element.clauses, **kw)} AS BLOB)"


@compiles(json_as_stored, "sqlite")
def _compile_json_as_stored(element: json_as_stored, compiler: SQLCompiler, **kw: Any) -> str:
    return f"CAST({compiler.process(element.clauses, **kw)} AS BLOB)"


@compiles(server_time, "sqlite")
def _compile_server_time(element: server_time, compiler: SQLCompiler, **kw: Any) -> str:
    return "NULL"


@compiles(next_draw_id, "sqlite")
def _compile_next_draw_id(element: next_draw_id, compiler: SQLCompiler, **kw: Any) -> str:
    return "NULL"


@compiles(in_turn, "sqlite")
def _compile_in_turn(element: in_turn, compiler: SQLCompiler, **kw: Any) -> str:
    return "1"


@compiles(joined, "sqlite")
def _compile_joined(element: joined, compiler: SQLCompiler, **kw: Any) -> str:
    return f"group_concat({compiler.process(element.clauses, **kw)})"


@compiles(seconds_between, "sqlite")
def _compile_seconds_between(element: seconds_between, compiler: SQLCompiler, **kw: Any) -> str:
    begin, end = (compiler.process(clause, **kw) for clause in element.clauses)
    return f"((julianday({end}) - julianday({begin})) * 86400.0)"


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


@compiles(matches, "sqlite")
def _compile_matches(element: matches, compiler: SQLCompiler, **kw: Any) -> str:
    text, pattern = (compiler.process(clause, **kw) for clause in element.clauses)
    return f"({text} GLOB {pattern})"


@compiles(bytewise, "sqlite")
def _compile_bytewise(element: bytewise, compiler: SQLCompiler, **kw: Any) -> str:
    return compiler.process(element.clauses, **kw)
