"""A statement that one module uses lives in that module; `database/statements` has the others."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src"
FOLDER = SOURCE / "replaydb" / "database" / "statements"
PACKAGE = "replaydb.database.statements"


def users() -> dict[tuple[str, str], set[str]]:
    """The modules that use each public function of the folder, by its module and name."""
    found: dict[tuple[str, str], set[str]] = defaultdict(set)
    for path in SOURCE.rglob("*.py"):
        text = path.read_text()
        if PACKAGE not in text and path.parent != FOLDER:
            continue
        module = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
        aliases: dict[str, str] = {}
        for statement in ast.parse(text).body:
            for node in ast.walk(statement):
                if isinstance(node, ast.ImportFrom) and node.module:
                    for name in node.names:
                        found[node.module, name.name].add(module)
                        aliases[name.asname or name.name] = f"{node.module}.{name.name}"
                elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                    found[aliases.get(node.value.id, ""), node.attr].add(module)
                elif isinstance(node, ast.Name) and node.id != getattr(statement, "name", None):
                    found[module, node.id].add(module)  # by another function of its module
    return found


def test_no_statement_has_one_user() -> None:
    found = users()
    functions = [
        (f"{PACKAGE}.{path.stem}", node.name)
        for path in FOLDER.glob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    ]
    assert len(functions) > 20
    single = {".".join(one): found[one] for one in functions if len(found[one]) < 2}
    assert single == {}, "a statement with one user belongs in the module of the user"
