"""Compilation of the expressions of `expressions.py` for PostgreSQL."""

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
    next_lease_id,
    seconds_between,
    server_time,
)


class command(ExecutableDDLElement):
    """A statement that takes no parameters, with names for the {} of its text."""

    def __init__(self, text: str, *names: str) -> None:
        self.text = text
        self.names = names


@compiles(command, "postgresql")
def _compile_command(element: command, compiler: DDLCompiler, **kw: Any) -> str:
    return element.text.format(*map(compiler.preparer.quote, element.names))


compile_as(
    "postgresql",
    {
        among: "{0} = ANY ({1})",
        # Rows are compared. For `column = value` the planner might scan the primary key instead.
        comes_after: "(({0}, {2}) > ({1}, {3}) AND {0} <= {1})",
        comes_before: "(({0}, {2}) < ({1}, {3}) AND {0} >= {1})",
        as_stored: "{0}",  # the server stores only valid JSON
        json_as_stored: "CAST({0} AS TEXT)",
        server_time: "clock_timestamp()",
        next_draw_id: "nextval('draw_id_seq')",
        next_lease_id: "nextval('lease_id_seq')",
        in_turn: "(pg_advisory_xact_lock({0}, CAST({1} % 2147483648 AS INTEGER)) IS NOT NULL)",
        joined: "string_agg(CAST({0} AS TEXT), ',')",
        seconds_between: "CAST(EXTRACT(EPOCH FROM ({1} - {0})) AS DOUBLE PRECISION)",
        matches: "({0} LIKE {1})",
        bytewise: '({0} COLLATE "C")',
    },
)


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
