"""SQL consists of SQLAlchemy expressions or constant text, and is never built from strings."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]

# Functions with a statement as first argument, in SQLAlchemy, alembic, aiosqlite and asyncpg.
SINKS = frozenset({
    "text", "TextClause", "DDL", "literal_column", "prefix_with", "suffix_with", "with_hint",
    "execute", "executemany", "executescript", "exec_driver_sql", "execute_fetchall",
    "execute_insert", "scalar", "scalars", "stream", "stream_scalars", "prepare", "cursor",
    "fetch", "fetchmany", "fetchrow", "fetchval", "copy_from_query",
})  # fmt: skip
# Functions that return the text of an argument.
PASSED_ON = frozenset({
    "str", "cast", "dedent", "strip", "lstrip", "rstrip", "upper", "lower",
    "text", "TextClause", "DDL",
})  # fmt: skip
BUILDERS = frozenset({
    "format", "format_map", "join", "replace", "substitute", "safe_substitute",
})  # fmt: skip


Scope = dict[str, list[ast.expr]]


class Finder(ast.NodeVisitor):
    """Finds lines on which a string that was built at run time reaches a sink."""

    def __init__(self) -> None:
        self.lines: list[int] = []
        self._scopes: list[Scope] = []

    def visit_Module(self, node: ast.Module) -> None:
        self._in_scope(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._in_scope(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._in_scope(node)

    def visit_Call(self, node: ast.Call) -> None:
        if _name(node.func) in SINKS:
            # `execute` of replaydb has the connection as first argument.
            first = 2 if isinstance(node.func, ast.Name) else 1
            statements = node.args[:first] + [
                keyword.value
                for keyword in node.keywords
                if keyword.arg in ("statement", "text", "sql", "query")
            ]
            if any(self._is_built(statement, frozenset()) for statement in statements):
                self.lines.append(node.lineno)
        self.generic_visit(node)

    def _in_scope(self, node: ast.Module | ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        scope: Scope = {}
        for name, value in _values(node):
            scope.setdefault(name, []).append(value)
        self._scopes.append(scope)
        self.generic_visit(node)
        self._scopes.pop()

    def _is_built(self, node: ast.expr, seen: frozenset[str]) -> bool:
        match node:
            case ast.JoinedStr():
                return any(isinstance(part, ast.FormattedValue) for part in node.values)
            case ast.BinOp(op=ast.Add() | ast.Mod() | ast.Mult()):
                return True
            case ast.IfExp():
                return self._any_built([node.body, node.orelse], seen)
            case ast.BoolOp() | ast.List() | ast.Tuple():
                return self._any_built(getattr(node, "values", getattr(node, "elts", [])), seen)
            case ast.NamedExpr() | ast.Await() | ast.Starred():
                return self._is_built(node.value, seen)
            case ast.GeneratorExp() | ast.ListComp():
                return self._is_built(node.elt, seen)
            case ast.Call():
                return self._call_builds(node, seen)
            case ast.Name(id=name) if name not in seen:
                scope = next((scope for scope in self._scopes[::-1] if name in scope), {})
                return self._any_built(scope.get(name, []), seen | {name})
        return False

    def _any_built(self, nodes: list[ast.expr], seen: frozenset[str]) -> bool:
        return any(self._is_built(node, seen) for node in nodes)

    def _call_builds(self, node: ast.Call, seen: frozenset[str]) -> bool:
        name = _name(node.func)
        if name in BUILDERS and isinstance(node.func, ast.Attribute):
            return True
        passed = list(node.args) if name in PASSED_ON else []
        # A method passes on its object, as in `"...".strip()`; a function its return values.
        match node.func:
            case ast.Attribute(value=of) if name in PASSED_ON:
                passed.append(of)
            case ast.Name():
                passed.append(node.func)
        return self._any_built(passed, seen)


def _name(function: ast.expr) -> str:
    match function:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def _values(scope: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yield the values assigned to the names of a scope. Functions yield their return values."""
    pending = list(ast.iter_child_nodes(scope))
    while pending:
        node = pending.pop()
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                for part in ast.walk(node):
                    if isinstance(part, ast.Return | ast.Yield) and part.value is not None:
                        yield node.name, part.value
                continue
            case ast.Assign(value=value):
                for target in node.targets:
                    if isinstance(target, ast.Name):
                        yield target.id, value
            case ast.AugAssign(target=ast.Name(id=name), value=value):
                yield name, ast.BinOp(ast.Name(name), node.op, value)
            case (
                ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
                | ast.NamedExpr(target=ast.Name(id=name), value=value)
                | ast.For(target=ast.Name(id=name), iter=value)
                | ast.AsyncFor(target=ast.Name(id=name), iter=value)
            ):
                yield name, value
        pending.extend(ast.iter_child_nodes(node))


def sql_from_strings(source: str) -> list[int]:
    finder = Finder()
    finder.visit(ast.parse(source))
    return finder.lines


@pytest.mark.parametrize("folder", ["src", "migrations"])
def test_no_sql_is_built_from_strings(folder: str) -> None:
    files = sorted((CHECKOUT / folder).rglob("*.py"))
    assert files
    found = {
        str(path.relative_to(CHECKOUT)): lines
        for path in files
        if (lines := sql_from_strings(path.read_text(encoding="utf8")))
    }
    assert found == {}


@pytest.mark.parametrize(
    "bad",
    [
        'execute(f"DELETE FROM {table}")',
        'execute(connection, text(f"DELETE FROM {table}"))',
        'connection.execute(text("DELETE FROM " + table))',
        'connection.exec_driver_sql("PRAGMA %s" % name)',
        'sa.text("SELECT {}".format(column))',
        'literal_column(", ".join(columns))',
        'DDL("CREATE TABLE x".replace("x", name))',
        'connection.scalar(statement=text(f"{a}"))',
        'await raw.fetchval(f"SELECT {a}", 1)',
        'cursor.executemany(f"INSERT INTO {table} VALUES (?)", rows)',
        'execute(str(f"SELECT {a}").strip())',
        'execute("SELECT 1" if a else f"SELECT {a}")',
        'execute(sql := "SELECT " + a)',
        'sql = f"SELECT {a}"\nexecute(sql)',
        'sql = "SELECT 1"\nsql += where\nexecute(sql)',
        'sql: str = "SELECT " + a\nexecute(text(sql))',
        'first = f"SELECT {a}"\nsecond = first\nexecute(second)',
        'SQL = "SELECT %s" % a\ndef f():\n    execute(SQL)',
        'def f():\n    sql = f"SELECT {a}"\n    if a:\n        execute(sql)',
        'def build(a):\n    return f"SELECT {a}"\nexecute(build(1))',
        'for sql in [f"DROP TABLE {t}" for t in tables]:\n    execute(sql)',
        'class A:\n    async def f(self):\n        await self.c.execute(f"SELECT {self.a}")',
    ],
)
def test_built_sql_is_detected(bad: str) -> None:
    assert sql_from_strings(bad)


@pytest.mark.parametrize(
    "good",
    [
        'execute("SELECT 1")',
        'execute(text("SELECT name FROM run WHERE id = :id"), {"id": f"run-{number}"})',
        'execute(select(run).where(run.c.name == f"run-{number}"))',
        'sql = "SELECT 1"\nexecute(sql)',
        'sql = ("SELECT 1 "\n "FROM run")\nexecute(text(sql))',
        'print(f"{a}")\nexecute(f"SELECT 1")',
        'def f():\n    sql = f"{a}"\n    print(sql)\ndef g(sql):\n    execute(sql)',
        "def build():\n    return select(run)\nexecute(build())",
    ],
)
def test_constant_sql_and_bound_values_are_allowed(good: str) -> None:
    assert sql_from_strings(good) == []
