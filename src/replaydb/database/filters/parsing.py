"""Parser of filters in the syntax of Python expressions over `replaydb.col`.

`reward_mean > 0.5 and tags["level"] == "hard"` is parsed by `ast` and never evaluated. Every known
node is translated to SQLAlchemy; anything else is refused with its position in the text.
"""

from __future__ import annotations

import ast
import operator
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from difflib import get_close_matches
from functools import reduce
from typing import Any, NoReturn, cast

from sqlalchemy import Column, ColumnElement, and_, func, not_, or_

from replaydb.database.filters import compiling
from replaydb.database.filters.group_columns import COLUMNS
from replaydb.database.filters.terms import FUNCTIONS
from replaydb.database.tables.column_types import UtcDateTime
from replaydb.errors import InvalidInputError

#: Maximum number of characters of a filter.
MAX_CHARACTERS = 2000

_ALLOWED = (
    "columns of groups, tags[...], constants, comparisons, in, is None, and, or, not, "
    f"+ - * / %, {', '.join(sorted(FUNCTIONS))}, and like, startswith, endswith, contains"
)
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
}
_LOGICAL: dict[type[ast.operator], Callable[..., ColumnElement[bool]]] = {
    ast.BitAnd: and_,
    ast.BitOr: or_,
}
#: Methods of columns and tags, with their number of arguments.
_METHODS = {
    **dict.fromkeys(("like", "ilike", "startswith", "istartswith"), 1),
    **dict.fromkeys(("endswith", "iendswith", "contains", "icontains"), 1),
    **dict.fromkeys(("in_", "not_in", "is_", "is_not"), 1),
    **dict.fromkeys(("as_string", "as_integer", "as_float", "as_boolean"), 0),
    "between": 2,
}


@dataclass(frozen=True, slots=True)
class Expression:
    """A parsed filter.

    Attributes:
        text: The filter in normalized syntax.
        where: The filter as the argument `where` of the calls of a buffer.
    """

    text: str
    where: ColumnElement[bool]


def parsed(text: str) -> Expression:
    """Parse a filter.

    Names are columns of `replaydb.col`; the prefixes `col.`, `rdb.col.` and `replaydb.col.` are
    optional. Write times as text such as "2026-11-22 18:30", in UTC unless the text has an offset.

    Args:
        text: The filter, on one or several lines.

    Raises:
        InvalidInputError: The filter is invalid. The error has the position and the allowed syntax.
    """
    if len(text) > MAX_CHARACTERS:
        raise InvalidInputError("where", f"at most {MAX_CHARACTERS} characters", len(text))
    line = " ".join(text.splitlines()).strip()
    tree = _tree(line)
    where = _Reader(line).condition(tree)
    compiling.checked(where)
    return Expression(ast.unparse(tree), where)


def _tree(line: str) -> ast.expr:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escape sequences in strings
            return ast.parse(line, mode="eval").body
    except SyntaxError as error:
        position = f"at character {error.offset}" if error.offset else "(unknown position)"
        raise InvalidInputError("where", _ALLOWED, f"{error.msg} {position}") from None
    except (ValueError, MemoryError, RecursionError) as error:
        # Surrogates, NUL characters, or too deep nesting.
        shown = f"text that cannot be parsed ({error})"
        raise InvalidInputError("where", _ALLOWED, shown) from None


class _Reader:
    """Translates a syntax tree to a filter."""

    def __init__(self, line: str) -> None:
        self._line = line
        self._depth = 0

    def condition(self, node: ast.expr) -> ColumnElement[bool]:
        """Translate a boolean expression."""
        translated = self._translate(node)
        if isinstance(translated, Column):  # a boolean one; `compiling.checked` refuses others
            translated = translated.is_(True)
        if not isinstance(translated, ColumnElement):
            self._refuse(node, "a condition, such as reward_mean > 0.5")
        return translated

    def _translate(self, node: ast.expr) -> Any:
        self._depth += 1
        if self._depth > compiling.MAX_DEPTH * 2:
            self._refuse(node, f"at most {compiling.MAX_DEPTH} nested levels")
        try:
            translated = self._translate_node(node)
        except InvalidInputError:
            raise
        except Exception as error:  # SQLAlchemy raises many types for operands it cannot combine
            self._refuse(node, _ALLOWED, error)
        self._depth -= 1
        return translated

    def _translate_node(self, node: ast.expr) -> Any:
        match node:
            case ast.BoolOp() | ast.BinOp() | ast.UnaryOp():
                return self._operation(node)
            case ast.Compare():
                return self._comparisons(node)
            case ast.Subscript():
                return self._tag(node)
            case ast.Call():
                return self._call(node)
            case ast.Constant(value=str() | int() | float() | bool() | None as value):
                return value
            case ast.Name() | ast.Attribute():
                return self._column(node)
        return self._refuse(node, _ALLOWED)

    def _operation(self, node: ast.BoolOp | ast.BinOp | ast.UnaryOp) -> Any:
        match node:
            case ast.BoolOp(op=logical, values=values):
                conditions = [self.condition(value) for value in values]
                return (and_ if isinstance(logical, ast.And) else or_)(*conditions)
            case ast.BinOp(left=left, op=logical, right=right) if type(logical) in _LOGICAL:
                return _LOGICAL[type(logical)](self.condition(left), self.condition(right))
            case ast.BinOp(left=left, op=arithmetic, right=right):
                return self._arithmetic(node, left, arithmetic, right)
            case ast.UnaryOp(op=ast.Not() | ast.Invert(), operand=operand):
                return not_(self.condition(operand))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self._translate(operand)
        return self._refuse(node, _ALLOWED)

    def _arithmetic(
        self, node: ast.expr, left: ast.expr, arithmetic: ast.operator, right: ast.expr
    ) -> Any:
        if type(arithmetic) not in _ARITHMETIC:
            self._refuse(node, "+, -, *, / or %")
        first, second = self._translate(left), self._translate(right)
        if not isinstance(first, ColumnElement) and not isinstance(second, ColumnElement):
            self._refuse(node, "a column on one side; write a constant as a single number")
        return _ARITHMETIC[type(arithmetic)](first, second)

    def _comparisons(self, node: ast.Compare) -> ColumnElement[bool]:
        """Translate a chain of comparisons: `a < b <= c` means `a < b and b <= c`."""
        conditions: list[ColumnElement[bool]] = []
        left = node.left
        for compare, right in zip(node.ops, node.comparators, strict=True):
            condition = self._comparison(node, left, compare, right)
            try:
                compiling.checked(condition)
            except InvalidInputError as error:
                self._refuse(node, error.expected, error.actual)
            conditions.append(condition)
            left = right
        return reduce(and_, conditions)

    def _comparison(
        self, node: ast.expr, left: ast.expr, compare: ast.cmpop, right: ast.expr
    ) -> ColumnElement[bool]:
        first = self._translate(left)
        if isinstance(compare, ast.In | ast.NotIn):
            if not isinstance(first, ColumnElement):
                self._refuse(left, "a column or a tag before in")
            listed = first.in_(self._list(right, first))
            return listed if isinstance(compare, ast.In) else not_(listed)
        second = self._translate(right)
        if not isinstance(first, ColumnElement):
            if not isinstance(second, ColumnElement):
                self._refuse(node, "a column or a tag on one side")
            first = self._of_type(left, first, second)
        else:
            second = self._of_type(right, second, first)
        if isinstance(compare, ast.Is | ast.IsNot):
            if second is not None and not isinstance(second, bool):
                self._refuse(right, "None, True or False after is")
            compared = first.is_ if isinstance(compare, ast.Is) else first.is_not
            return cast("ColumnElement[bool]", compared(second))
        return cast("ColumnElement[bool]", _COMPARISONS[type(compare)](first, second))

    def _of_type(self, node: ast.expr, value: Any, other: ColumnElement[Any]) -> Any:
        """Convert text to a time if it is compared with a time; return other constants as is."""
        if not isinstance(value, str) or not isinstance(other.type, UtcDateTime):
            return value
        try:
            time = datetime.fromisoformat(value)
        except ValueError:
            self._refuse(node, 'a time such as "2026-11-22 18:30"')
        return time if time.tzinfo else time.replace(tzinfo=UTC)

    def _list(self, node: ast.expr, of: ColumnElement[Any]) -> list[Any]:
        if not isinstance(node, ast.List | ast.Tuple | ast.Set):
            self._refuse(node, "a list of constants")
        return [self._of_type(element, self._constant(element), of) for element in node.elts]

    def _constant(self, node: ast.expr) -> Any:
        value = self._translate(node)
        if isinstance(value, ColumnElement):
            self._refuse(node, "a constant")
        return value

    def _tag(self, node: ast.Subscript) -> Any:
        """`tags["a"]`, `tags["a"]["b"]`, `tags["a", 0]`."""
        of = self._translate(node.value)
        if not isinstance(of, ColumnElement):
            self._refuse(node, 'tags["name"]')
        if isinstance(node.slice, ast.Tuple):
            return of[tuple(self._constant(step) for step in node.slice.elts)]
        return of[self._constant(node.slice)]

    def _call(self, node: ast.Call) -> Any:
        if node.keywords:
            self._refuse(node, "positional arguments only")
        match node.func:
            case ast.Name(id=name) if name in FUNCTIONS:
                return getattr(func, name)(*(self._translate(argument) for argument in node.args))
            case ast.Attribute(value=of, attr=name) if len(node.args) == _METHODS.get(name):
                subject = self._translate(of)
                if not isinstance(subject, ColumnElement):
                    self._refuse(of, f"a column or a tag before .{name}()")
                return getattr(subject, name)(*self._arguments(name, node.args, subject))
        return self._refuse(
            node, f"one of the functions {', '.join(sorted({*FUNCTIONS, *_METHODS}))}"
        )

    def _arguments(self, name: str, nodes: list[ast.expr], of: ColumnElement[Any]) -> list[Any]:
        if name in ("in_", "not_in"):
            return [self._list(nodes[0], of)]
        return [self._of_type(node, self._constant(node), of) for node in nodes]

    def _column(self, node: ast.Name | ast.Attribute) -> Column[Any]:
        name = node.id if isinstance(node, ast.Name) else node.attr
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) not in _PREFIXES:
            self._refuse(node, _ALLOWED)
        if name not in COLUMNS:
            near = get_close_matches(name, COLUMNS, n=1)
            known = f"did you mean {near[0]}?" if near else ", ".join(sorted(COLUMNS))
            self._refuse(node, f"a column of groups: {known}")
        return COLUMNS[name]

    def _refuse(self, node: ast.expr, expected: str, why: object = None) -> NoReturn:
        position = len(self._line.encode()[: node.col_offset].decode(errors="ignore")) + 1
        source = ast.get_source_segment(self._line, node) or ""
        shown = source if len(source) <= _MAX_SHOWN else f"{source[:_MAX_SHOWN]}..."
        reason = f" ({why})" if why is not None else ""
        actual = f"{shown!r} at character {position}{reason}"
        raise InvalidInputError("where", expected, actual) from None


_PREFIXES = ("col", "rdb.col", "replaydb.col")
_MAX_SHOWN = 80
