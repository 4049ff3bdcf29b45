"""Only the engines, and types whose values they store differently, know which engine is in use."""

from __future__ import annotations

import ast
from pathlib import Path

import replaydb

PACKAGE = Path(replaydb.__file__).parent
ENGINES = ("database/sqlite/", "database/postgresql/")
TYPES = {"database/tables/column_types.py", "database/tables/expressions.py"}


def asks_for_engine(code: str) -> bool:
    """Whether code reads the name of a dialect."""
    return any(
        isinstance(node, ast.Attribute)
        and node.attr == "name"
        and (getattr(node.value, "attr", None) or getattr(node.value, "id", None)) == "dialect"
        for node in ast.walk(ast.parse(code))
    )


def test_no_other_code_asks_for_the_engine() -> None:
    assert asks_for_engine("if connection.dialect.name == 'sqlite': ...")
    assert asks_for_engine("if dialect.name != 'sqlite': ...")
    asking = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if asks_for_engine(path.read_text(encoding="utf-8"))
    }
    assert {name for name in asking if not name.startswith(ENGINES)} == TYPES
