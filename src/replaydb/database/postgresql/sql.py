"""Compilation of the expressions of `expressions.py` for PostgreSQL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Table
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
    next_lease_id,
    seconds_between,
    server_time,
)


class rewrite_table(ExecutableDDLElement):
    """Rewrite a table and its indexes without the space of deleted rows."""

    def __init__(self, table: Table) -> None:
        self.table = table


@compiles(rewrite_table, "postgresql")
def _compile_rewrite_table(element: rewrite_table, compiler: DDLCompiler, **kw: Any) -> str:
    return f"VACUUM (FULL, ANALYZE) {compiler.preparer.format_table(element.table)}"


class lock_tables(ExecutableDDLElement):
    """Lock tables against all other transactions until this one ends."""

    def __init__(self, tables: Sequence[Table]) -> None:
        self.tables = tables


@compiles(lock_tables, "postgresql")
def _compile_lock_tables(element: lock_tables, compiler: DDLCompiler, **kw: Any) -> str:
    names = ", ".join(compiler.preparer.format_table(table) for table in element.tables)
    return f"LOCK TABLE {names} IN ACCESS EXCLUSIVE MODE"


@compiles(among, "postgresql")
def _compile_among(element: among, compiler: SQLCompiler, **kw: Any) -> str:
    left, values = (compiler.process(clause, **kw) for clause in element.clauses)
    return f"{left} = ANY ({values})"


@compiles(comes_after, "postgresql")
def _compile_comes_after(element: comes_after, compiler: SQLCompiler, **kw: Any) -> str:
    """Compare rows. For `column = value` the planner might scan the primary key instead."""
    column, value, id_column, last = (compiler.process(one, **kw) for one in element.clauses)
    return f"(({column}, {id_column}) > ({value}, {last}) AND {column} <= {value})"


@compiles(comes_before, "postgresql")
def _compile_comes_before(element: comes_before, compiler: SQLCompiler, **kw: Any) -> str:
    column, value, id_column, last = (compiler.process(one, **kw) for one in element.clauses)
    return f"(({column}, {id_column}) < ({value}, {last}) AND {column} >= {value})"


@compiles(as_stored, "postgresql")
def _compile_as_stored(element: as_stored, compiler: SQLCompiler, **kw: Any) -> str:
    return compiler.process(element.clauses, **kw)  # the server stores only valid JSON


@compiles(json_as_stored, "postgresql")
def _compile_json_as_stored(element: json_as_stored, compiler: SQLCompiler, **kw: Any) -> str:
    return f"CAST({compiler.process(element.clauses, **kw)} AS TEXT)"


@compiles(server_time, "postgresql")
def _compile_server_time(element: server_time, compiler: SQLCompiler, **kw: Any) -> str:
    return "clock_timestamp()"


@compiles(next_draw_id, "postgresql")
def _compile_next_draw_id(element: next_draw_id, compiler: SQLCompiler, **kw: Any) -> str:
    return "nextval('draw_id_seq')"


@compiles(next_lease_id, "postgresql")
def _compile_next_lease_id(element: next_lease_id, compiler: SQLCompiler, **kw: Any) -> str:
    return "nextval('lease_id_seq')"


@compiles(in_turn, "postgresql")
def _compile_in_turn(element: in_turn, compiler: SQLCompiler, **kw: Any) -> str:
    kind, key = (compiler.process(clause, **kw) for clause in element.clauses)
    return f"(pg_advisory_xact_lock({kind}, CAST({key} % 2147483648 AS INTEGER)) IS NOT NULL)"


@compiles(joined, "postgresql")
def _compile_joined(element: joined, compiler: SQLCompiler, **kw: Any) -> str:
    return f"string_agg(CAST({compiler.process(element.clauses, **kw)} AS TEXT), ',')"


@compiles(seconds_between, "postgresql")
def _compile_seconds_between(element: seconds_between, compiler: SQLCompiler, **kw: Any) -> str:
    begin, end = (compiler.process(clause, **kw) for clause in element.clauses)
    return f"CAST(EXTRACT(EPOCH FROM ({end} - {begin})) AS DOUBLE PRECISION)"


@compiles(json_part, "postgresql")
def _compile_json_part(element: json_part, compiler: SQLCompiler, **kw: Any) -> str:
    """Take each step with `->`. A text selects only from objects, an integer only from arrays."""
    path = " -> ".join(compiler.process(clause, **kw) for clause in element.clauses)
    return f"CASE {_JSON_KINDS[type(element)].format(f'({path})')} END"


_JSON_KINDS = {
    json_text: "json_typeof({0}) WHEN 'string' THEN {0} #>> '{{}}'",
    json_integer: (
        "WHEN json_typeof({0}) = 'number' AND {0} #>> '{{}}' ~ '^-?[0-9]{{1,20}}$' THEN"
        " CASE WHEN CAST({0} #>> '{{}}' AS NUMERIC)"
        " BETWEEN -9223372036854775808 AND 9223372036854775807"
        " THEN CAST({0} #>> '{{}}' AS BIGINT) END"
    ),
    json_double: "json_typeof({0}) WHEN 'number' THEN CAST({0} #>> '{{}}' AS DOUBLE PRECISION)",
    json_boolean: "json_typeof({0}) WHEN 'boolean' THEN CAST({0} #>> '{{}}' AS BOOLEAN)",
    json_kind: "json_typeof({0}) WHEN 'null' THEN NULL ELSE json_typeof({0})",
}


@compiles(matches, "postgresql")
def _compile_matches(element: matches, compiler: SQLCompiler, **kw: Any) -> str:
    text, pattern = (compiler.process(clause, **kw) for clause in element.clauses)
    return f"({text} LIKE {pattern})"


@compiles(bytewise, "postgresql")
def _compile_bytewise(element: bytewise, compiler: SQLCompiler, **kw: Any) -> str:
    return f'({compiler.process(element.clauses, **kw)} COLLATE "C")'
