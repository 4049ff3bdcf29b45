"""Query plans of both engines in a common form, with assertions."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Executable
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.elements import ClauseElement


class explain(Executable, ClauseElement):
    """EXPLAIN of a statement."""

    inherit_cache = False

    def __init__(self, statement: Any) -> None:
        self.statement = statement


def _process(element: explain, compiler: SQLCompiler, **kw: Any) -> str:
    inner = compiler.process(element.statement, **kw)
    compiler.isinsert = compiler.isupdate = compiler.isdelete = False
    compiler._result_columns.clear()  # the result is a plan, not rows of the statement
    return inner


@compiles(explain, "sqlite")
def _sqlite(element: explain, compiler: SQLCompiler, **kw: Any) -> str:
    return f"EXPLAIN QUERY PLAN {_process(element, compiler, **kw)}"


@compiles(explain, "postgresql")
def _postgresql(element: explain, compiler: SQLCompiler, **kw: Any) -> str:
    return f"EXPLAIN (FORMAT JSON) {_process(element, compiler, **kw)}"


@dataclass(frozen=True, slots=True)
class Plan:
    """A query plan.

    Attributes:
        indexes: Indexes that are searched by key or range.
        scans: Tables that are scanned completely.
        sorts: Whether rows are sorted.
        tables: Tables that are accessed.
        text: The full plan.
    """

    indexes: frozenset[str]
    scans: frozenset[str]
    sorts: bool
    tables: frozenset[str]
    text: str


#: Tables to ignore: of `buffer` a single row is read, for its policy version.
_IGNORED = ("buffer",)


async def plan_of(
    connection: AsyncConnection, statement: Any, parameters: Mapping[str, Any] | None = None
) -> Plan:
    """Return the plan of a statement with parameters, or of a prepared statement with values."""
    if isinstance(statement, tuple):
        statement, parameters = statement[:2]
    rows = (await connection.execute(explain(statement), parameters or {})).all()
    if connection.dialect.name == "sqlite":
        return _from_sqlite([row[-1] for row in rows])
    tree = rows[0][0]
    return _from_postgresql(json.loads(tree) if isinstance(tree, str) else tree)


def _from_sqlite(lines: list[str]) -> Plan:
    lookups = [re.match(r"(SEARCH|SCAN) (\w+)(?: USING (?:COVERING )?INDEX (\w+)| USING INTEGER"
                        r" PRIMARY KEY| USING PRIMARY KEY)?", line) for line in lines]  # fmt: skip
    found = [match for match in lookups if match and match[2] not in ("json_each", *_IGNORED)]
    return Plan(
        indexes=frozenset(_index(match) for match in found if match[1] == "SEARCH"),
        scans=frozenset(match[2] for match in found if match[1] == "SCAN"),
        sorts=any("TEMP B-TREE" in line for line in lines),
        tables=frozenset(match[2] for match in found),
        text="\n".join(lines),
    )


def _index(found: re.Match[str]) -> str:
    """Return the schema's name of an index; SQLite generates others for keys and constraints."""
    if found[3] == "sqlite_autoindex_episode_group_1":
        return "uq_episode_group_buffer_id_group_uid"
    if found[3] is None or found[3].startswith("sqlite_autoindex"):
        return f"pk_{found[2]}"
    return found[3]


def _from_postgresql(tree: Any) -> Plan:
    nodes = [n for n in _nodes(tree[0]["Plan"]) if n.get("Relation Name") not in _IGNORED]
    reads = [node for node in nodes if "Index Cond" in node or "TID Cond" in node]
    return Plan(
        indexes=frozenset(node["Index Name"] for node in reads if "Index Name" in node),
        scans=frozenset(
            node.get("Relation Name", node.get("Index Name"))
            for node in nodes
            if node["Node Type"] == "Seq Scan" or ("Index Name" in node and node not in reads)
        ),
        sorts=any("Sort" in node["Node Type"] for node in nodes),
        tables=frozenset(node["Relation Name"] for node in nodes if "Relation Name" in node),
        text=json.dumps(tree, indent=1),
    )


def _nodes(node: Any) -> Iterator[Any]:
    yield node
    for child in node.get("Plans", ()):
        yield from _nodes(child)


def assert_reads_only(
    plan: Plan, index: str, tables: frozenset[str] = frozenset({"episode_group"})
) -> None:
    """Assert that one range of one index yields the rows in order, without other accesses."""
    assert not plan.scans, plan.text
    assert not plan.sorts, plan.text
    assert plan.indexes == {index}, plan.text
    assert plan.tables == tables, plan.text


def assert_stays_within(plan: Plan, *indexes: str) -> None:
    """Assert that one range of one of the indexes yields the rows, without other accesses."""
    assert not plan.scans, plan.text
    assert plan.indexes in [{index} for index in indexes], plan.text
    assert plan.tables == {"episode_group"}, plan.text
