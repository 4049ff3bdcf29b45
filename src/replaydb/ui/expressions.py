"""Filters as text: what Python would say over `replaydb.col`, read without being run.

`reward_mean > 0.5 and tags["level"] == "hard"` is parsed by `ast`; each part that is known here
becomes the part of a filter that it stands for, and everything else is refused with its place.
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

from replaydb.database import filters
from replaydb.database.column_types import UtcDateTime
from replaydb.database.group_columns import COLUMNS
from replaydb.database.terms import FUNCTIONS
from replaydb.errors import InvalidInputError

#: Characters of a filter.
MOST_CHARACTERS = 2000

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
_JOINED: dict[type[ast.operator], Callable[..., ColumnElement[bool]]] = {
    ast.BitAnd: and_,
    ast.BitOr: or_,
}
#: Methods of columns and tags, with how many constants they take.
_METHODS = {
    **dict.fromkeys(("like", "ilike", "startswith", "istartswith"), 1),
    **dict.fromkeys(("endswith", "iendswith", "contains", "icontains"), 1),
    **dict.fromkeys(("in_", "not_in", "is_", "is_not"), 1),
    **dict.fromkeys(("as_string", "as_integer", "as_float", "as_boolean"), 0),
    "between": 2,
}


@dataclass(frozen=True, slots=True)
class Expression:
    """A filter that was read.

    Attributes:
        text: As it was understood, with one way to write everything.
        where: As calls of a buffer take it.
    """

    text: str
    where: ColumnElement[bool]


def parsed(text: str, field: str = "where") -> Expression:
    """A filter from its text.

    Names are the columns of `replaydb.col`; `col.` and `rdb.col.` before them may be there or not.
    Times are compared with text such as "2026-11-22 18:30", in UTC unless it says otherwise.

    Args:
        text: On one line or several.
        field: What errors call it.

    Raises:
        InvalidInputError: It is no filter; it says where, and what is allowed.
    """
    if len(text) > MOST_CHARACTERS:
        raise InvalidInputError(field, f"at most {MOST_CHARACTERS} characters", len(text))
    line = " ".join(text.splitlines()).strip()
    tree = _tree(line, field)
    where = _Reader(line, field).condition(tree)
    try:
        filters.checked(where)
    except InvalidInputError as error:
        raise InvalidInputError(field, error.expected, error.actual) from None
    return Expression(ast.unparse(tree), where)


def _tree(line: str, field: str) -> ast.expr:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of unknown escapes in strings
            return ast.parse(line, mode="eval").body
    except SyntaxError as error:
        place = f"at character {error.offset}" if error.offset else "somewhere in it"
        raise InvalidInputError(field, _ALLOWED, f"{error.msg} {place}") from None
    except (ValueError, MemoryError, RecursionError) as error:
        # Surrogates and NUL; what is nested too deeply.
        raise InvalidInputError(field, _ALLOWED, f"what cannot be read ({error})") from None


class _Reader:
    """Makes a filter of a tree."""

    def __init__(self, line: str, field: str) -> None:
        self._line = line
        self._field = field
        self._depth = 0

    def condition(self, node: ast.expr) -> ColumnElement[bool]:
        """A part that is true or false."""
        made = self._read(node)
        if isinstance(made, Column):  # of truth values; others are refused
            made = made.is_(True)
        if not isinstance(made, ColumnElement):
            self._refuse(node, "a condition, such as reward_mean > 0.5")
        return made

    def _read(self, node: ast.expr) -> Any:
        self._depth += 1
        if self._depth > filters.MAX_DEPTH * 2:
            self._refuse(node, f"parts nested {filters.MAX_DEPTH} deep")
        try:
            made = self._made(node)
        except InvalidInputError:
            raise
        except Exception as error:  # SQLAlchemy has many errors for what it cannot join
            self._refuse(node, _ALLOWED, error)
        self._depth -= 1
        return made

    def _made(self, node: ast.expr) -> Any:
        match node:
            case ast.BoolOp() | ast.BinOp() | ast.UnaryOp():
                return self._joined(node)
            case ast.Compare():
                return self._compared(node)
            case ast.Subscript():
                return self._tag(node)
            case ast.Call():
                return self._called(node)
            case ast.Constant(value=str() | int() | float() | bool() | None as value):
                return value
            case ast.Name() | ast.Attribute():
                return self._column(node)
        return self._refuse(node, _ALLOWED)

    def _joined(self, node: ast.BoolOp | ast.BinOp | ast.UnaryOp) -> Any:
        match node:
            case ast.BoolOp(op=joined, values=values):
                conditions = [self.condition(value) for value in values]
                return (and_ if isinstance(joined, ast.And) else or_)(*conditions)
            case ast.BinOp(left=left, op=joined, right=right) if type(joined) in _JOINED:
                return _JOINED[type(joined)](self.condition(left), self.condition(right))
            case ast.BinOp(left=left, op=calculated, right=right):
                return self._calculated(node, left, calculated, right)
            case ast.UnaryOp(op=ast.Not() | ast.Invert(), operand=operand):
                return not_(self.condition(operand))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self._read(operand)
        return self._refuse(node, _ALLOWED)

    def _calculated(
        self, node: ast.expr, left: ast.expr, calculated: ast.operator, right: ast.expr
    ) -> Any:
        if type(calculated) not in _ARITHMETIC:
            self._refuse(node, "+, -, *, / or %")
        first, second = self._read(left), self._read(right)
        if not isinstance(first, ColumnElement) and not isinstance(second, ColumnElement):
            self._refuse(node, "a column on one side; what is constant you can calculate")
        return _ARITHMETIC[type(calculated)](first, second)

    def _compared(self, node: ast.Compare) -> ColumnElement[bool]:
        """`a < b <= c` means `a < b and b <= c`, as in Python."""
        conditions: list[ColumnElement[bool]] = []
        left = node.left
        for compare, right in zip(node.ops, node.comparators, strict=True):
            condition = self._comparison(node, left, compare, right)
            try:
                filters.checked(condition)
            except InvalidInputError as error:
                self._refuse(node, error.expected, error.actual)
            conditions.append(condition)
            left = right
        return reduce(and_, conditions)

    def _comparison(
        self, node: ast.expr, left: ast.expr, compare: ast.cmpop, right: ast.expr
    ) -> ColumnElement[bool]:
        first = self._read(left)
        if isinstance(compare, ast.In | ast.NotIn):
            if not isinstance(first, ColumnElement):
                self._refuse(left, "a column or a tag before in")
            listed = first.in_(self._list(right, first))
            return listed if isinstance(compare, ast.In) else not_(listed)
        second = self._read(right)
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
        """A constant as what it is compared with: text is a time where the other is one."""
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
        value = self._read(node)
        if isinstance(value, ColumnElement):
            self._refuse(node, "a constant")
        return value

    def _tag(self, node: ast.Subscript) -> Any:
        """`tags["a"]`, `tags["a"]["b"]`, `tags["a", 0]`."""
        of = self._read(node.value)
        if not isinstance(of, ColumnElement):
            self._refuse(node, 'tags["name"]')
        if isinstance(node.slice, ast.Tuple):
            return of[tuple(self._constant(step) for step in node.slice.elts)]
        return of[self._constant(node.slice)]

    def _called(self, node: ast.Call) -> Any:
        if node.keywords:
            self._refuse(node, "no names of arguments")
        match node.func:
            case ast.Name(id=name) if name in FUNCTIONS:
                return getattr(func, name)(*(self._read(argument) for argument in node.args))
            case ast.Attribute(value=of, attr=name) if len(node.args) == _METHODS.get(name):
                subject = self._read(of)
                if not isinstance(subject, ColumnElement):
                    self._refuse(of, f"a column or a tag before .{name}()")
                return getattr(subject, name)(*self._arguments(name, node.args, subject))
        return self._refuse(node, f"{', '.join(sorted({*FUNCTIONS, *_METHODS}))} as functions")

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
        place = len(self._line.encode()[: node.col_offset].decode(errors="ignore")) + 1
        what = ast.get_source_segment(self._line, node) or ""
        shown = what if len(what) <= _SHOWN else f"{what[:_SHOWN]}..."
        reason = f" ({why})" if why is not None else ""
        actual = f"{shown!r} at character {place}{reason}"
        raise InvalidInputError(self._field, expected, actual) from None


_PREFIXES = ("col", "rdb.col", "replaydb.col")
_SHOWN = 80
