"""Mutants of the package, and a sample of them that is stable between versions of the code."""

from __future__ import annotations

import ast
import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.ast.ast_query import ASTQuery
from cosmic_ray.plugins import get_operator
from cosmic_ray.work_item import MutationSpec, WorkItem

PACKAGE = Path("src/replaydb")
FOLDERS = "database", "buffer", "batch", "codec"

_BINARY = """
    Add_Sub Sub_Add Mul_FloorDiv FloorDiv_Mul Div_Mul Mod_FloorDiv Pow_Mul
    LShift_RShift RShift_LShift BitAnd_BitOr BitOr_BitAnd BitXor_BitAnd
"""
_COMPARISON = """
    Eq_NotEq NotEq_Eq Is_IsNot IsNot_Is
    Lt_LtE Lt_GtE LtE_Lt LtE_Gt Gt_GtE Gt_LtE GtE_Gt GtE_Lt
"""
#: The operators of cosmic-ray whose mutants resemble mistakes. It could also replace each binary
#: operator by the eleven others, but nearly all of these mutants raise a TypeError at once.
OPERATORS = (
    *(f"core/ReplaceBinaryOperator_{pair}" for pair in _BINARY.split()),
    *(f"core/ReplaceComparisonOperator_{pair}" for pair in _COMPARISON.split()),
    "core/ReplaceUnaryOperator_USub_UAdd",
    "core/ReplaceUnaryOperator_Delete_Invert",
    "core/ReplaceUnaryOperator_Delete_Not",
    "core/AddNot",
    "core/ReplaceTrueWithFalse",
    "core/ReplaceFalseWithTrue",
    "core/ReplaceAndWithOr",
    "core/ReplaceOrWithAnd",
    "core/ReplaceBreakWithContinue",
    "core/ReplaceContinueWithBreak",
    "core/ExceptionReplacer",
    "core/NumberReplacer",
    "core/RemoveDecorator",
    "core/ZeroIterationForLoop",
)

#: Decorators that have no effect at run time, or whose removal breaks the import.
_IDLE_DECORATORS = re.compile(r"(abstractmethod|dataclass|final|overload|override)\b")


def source_files() -> list[Path]:
    """Return the files that are mutated, relative to the current directory."""
    return sorted(chain.from_iterable((PACKAGE / name).rglob("*.py") for name in FOLDERS))


def mutants_of(path: Path) -> Iterator[WorkItem]:
    """Yield all mutants of a file that tests could detect.

    The name of a mutant does not depend on code outside its function. It is a digest of the file,
    the function, the operator, the line, and a number if these occur repeatedly.
    """
    source = path.read_text(encoding="utf8")
    lines = source.splitlines()
    nodes = list(ast_nodes(get_ast(source)))
    idle = [_span(node) for node in _idle_nodes(ast.parse(source))]
    seen: Counter[tuple[str, ...]] = Counter()
    for operator_name in OPERATORS:
        operator = get_operator(operator_name)()
        positions = (
            (n, start, end) for n in nodes for start, end in operator.mutation_positions(n)
        )
        for occurrence, (node, start, end) in enumerate(positions):
            if any(first <= start < last for first, last in idle) or _is_separator(node):
                continue
            definition = ASTQuery(node).get_definition_name()
            key = path.as_posix(), str(definition), operator_name, lines[start[0] - 1].strip()
            seen[key] += 1
            spec = MutationSpec(
                module_path=path,
                operator_name=operator_name,
                occurrence=occurrence,
                start_pos=start,
                end_pos=end,
                definition_name=definition,
            )
            yield WorkItem.single(_digest(*key, seen[key])[:10], spec)


def sample(paths: Iterable[Path], number: int, seed: int) -> list[WorkItem]:
    """Choose `number` mutants of the files, for each file in proportion to its lines.

    The mutants of a file are ranked by a digest. Changing one file changes the number of mutants of
    another by less than one, and does not change their order.
    """
    ranked: list[tuple[float, WorkItem]] = []
    for path in paths:
        size = len(path.read_text(encoding="utf8").splitlines())
        phase = int(_digest(seed, path.as_posix())[:8], 16) / 2**32
        mutants = sorted(mutants_of(path), key=lambda one: _digest(seed, one.job_id))
        ranked += (((rank + phase) / size, one) for rank, one in enumerate(mutants))
    return [one for _, one in sorted(ranked, key=lambda pair: pair[0])[:number]]


def _digest(*parts: object) -> str:
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()


def _span(node: ast.AST) -> tuple[tuple[int, int], tuple[int, int]]:
    assert isinstance(node, ast.expr | ast.stmt)
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    first = node.lineno, node.col_offset - 1  # with the @ of a decorator
    return first, (node.end_lineno, node.end_col_offset)


def _idle_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield nodes that tests cannot or should not check: types, assertions and log messages."""
    for node in ast.walk(tree):
        types = getattr(node, "annotation", None), getattr(node, "returns", None)
        yield from filter(None, types)
        yield from filter(_is_idle, getattr(node, "decorator_list", ()))
        match node:
            case ast.Assert() | ast.ClassDef(bases=[ast.Name(id="Protocol"), *_]):
                yield node
            case ast.If() if "TYPE_CHECKING" in ast.unparse(node.test):
                yield node
            case ast.Call(func=ast.Attribute(value=ast.Name(id="logger"))):
                yield node
            case ast.Call(func=ast.Name(id="cast" | "TypeVar")):
                yield node.args[0]
            case ast.keyword(arg="strict"):  # of zip: also an assertion
                yield node.value


def _is_separator(node: Any) -> bool:
    """Whether it is the `*` or `/` between parameters, which cosmic-ray treats as an operator."""
    return bool(node.type == "operator" and node.parent.type == "parameters")


def _is_idle(decorator: ast.expr) -> bool:
    return _IDLE_DECORATORS.match(ast.unparse(decorator)) is not None
