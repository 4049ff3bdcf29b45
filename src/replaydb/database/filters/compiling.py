"""Recompilation of filters: the `where=` expressions that callers write over `replaydb.col`.

A filter is rebuilt from an allow-list: columns of the group, constants of a few types, and the
operators and functions below. Only the rebuilt expression reaches the database. Everything else
that SQLAlchemy can express is refused. `docs/filters.md` describes each part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial, reduce
from typing import Any

from sqlalchemy import (
    BindParameter,
    Boolean,
    Case,
    Column,
    ColumnElement,
    Double,
    Float,
    Integer,
    String,
    Table,
    and_,
    case,
    false,
    not_,
    or_,
    select,
    true,
)
from sqlalchemy.sql import elements, functions, operators
from sqlalchemy.types import TypeEngine

from replaydb.database.filters.group_columns import COLUMNS
from replaydb.database.filters.terms import (
    Kind,
    Operator,
    Part,
    Tag,
    Term,
    as_kind,
    calculated,
    called,
    common_kind,
    compared,
    constant,
    is_missing,
    matching,
    one_of,
    refused,
    shown,
)
from replaydb.database.tables.column_types import Tags, UtcDateTime
from replaydb.database.tables.expressions import among
from replaydb.database.tables.schema import episode_group, run, task
from replaydb.database.tables.staleness import current_staleness, staleness_if_drawn
from replaydb.domain import checks

MAX_VALUES = 10_000
MAX_PARTS = 1000  # SQLite nests a thousand expressions at most
MAX_DEPTH = 16  # SQLite's parser has a stack of 100, and a level takes five entries at most
MAX_STEPS = 16  # in a path into the tags: each adds a table to a join

_EXPECTED = "an expression over replaydb.col, such as replaydb.col.reward_std > 0.1"


def checked(where: Any) -> ColumnElement[bool] | None:
    """Return a condition over the columns of `episode_group` that both engines evaluate alike.

    Raises:
        InvalidInputError: `where` is not a condition, or has a part that filters may not have.
    """
    if where is None:
        return None
    if not isinstance(where, ColumnElement):
        refused(_EXPECTED, repr(where))
    return _Compiler().condition(where)


def at_most_stale(limit: int) -> ColumnElement[bool]:
    """Return the condition for a known staleness, if drawn, of at most `limit` versions."""
    return staleness_if_drawn() <= limit


def of_runs(names: Sequence[str]) -> ColumnElement[bool]:
    """Return the condition for groups that were put by one of these runs."""
    return episode_group.c.run_id.in_(select(run.c.id).where(among(run.c.name, names)))


def all_of(conditions: Iterable[ColumnElement[bool] | None]) -> ColumnElement[bool] | None:
    """Join conditions with AND, and skip those that are None. Returns None if all are."""
    given = [condition for condition in conditions if condition is not None]
    return and_(*given) if given else None


def _known_column(element: Column[Any]) -> Column[Any] | None:
    """Return the column of `replaydb.col` that `element` is or is an unpickled copy of, or None."""
    column, table = COLUMNS.get(element.key), element.table
    is_copy = (
        type(table) is Table and table is not episode_group and table.name == episode_group.name
    )
    return column if element is column or is_copy else None


class _Compiler:
    """Rebuilds one filter. Elements of a type without a method here are refused."""

    def __init__(self) -> None:
        self._parts = 0
        self._values = 0
        self._depth = 0

    def condition(self, element: Any) -> ColumnElement[bool]:
        """Parse an element that is true or false."""
        part = self.read(element)
        if not (isinstance(part, Term) and part.kind == "boolean"):
            refused(_EXPECTED, f"{shown(element)}, which is not a condition")
        return part.sql

    def read(self, element: Any) -> Part:
        """Parse an element of any kind."""
        read = _READERS.get(type(element))
        if read is None:
            refused(_EXPECTED, f"a {type(element).__name__} in it")
        self._parts += 1
        self._depth += 1
        if self._parts > MAX_PARTS or self._depth > MAX_DEPTH:
            refused(f"at most {MAX_PARTS} parts, nested {MAX_DEPTH} deep", "more")
        part = read(self, element)
        self._depth -= 1
        return part

    def _column(self, element: Column[Any]) -> Part:
        column = _known_column(element)
        if column is None:
            refused(_EXPECTED, f"{shown(element)} in it")
        if isinstance(column.type, Tags):
            refused("a part of the tags, such as tags['level']", "all of them")
        if column is episode_group.c.staleness:
            return _STALENESS
        return Term(column, _kind_of(column.type))

    def _constant(self, element: BindParameter[Any]) -> Part:
        return constant(self._value(element))

    def _value(self, element: Any) -> Any:
        """Return the value of a parameter.

        Parameters with a fixed name are refused, as it could be the name of an internal parameter.
        """
        if (
            type(element) is not BindParameter
            or not element.unique
            or element.callable is not None
            or element.literal_execute
            or not _is_known(element.type)
        ):
            refused("plain Python values", shown(element))
        value = element.value
        self._values += len(value) if isinstance(value, list | tuple) else 1
        if self._values > MAX_VALUES:
            refused(f"at most {MAX_VALUES} values", "more")
        return value

    def _boolean_list(self, element: elements.BooleanClauseList) -> Part:
        conditions = [self.condition(clause) for clause in element.clauses]
        if element.operator is operators.and_:
            return Term(and_(true(), *conditions), "boolean")
        return Term(or_(false(), *conditions), "boolean")

    def _unary(self, element: elements.UnaryExpression[Any]) -> Part:
        if element.modifier is None:
            if element.operator in (operators.inv, operators.is_false):
                return Term(not_(self.condition(element.element)), "boolean")
            if element.operator is operators.is_true:
                return Term(self.condition(element.element), "boolean")
            if element.operator is operators.neg:
                return Term(-as_kind(self.read(element.element), "number").sql, "number")
        does = element.operator or element.modifier
        return refused(_EXPECTED, f"{getattr(does, '__name__', does)} in it")

    def _case(self, element: Case[Any]) -> Part:
        subject = None if element.value is None else self.read(element.value)
        conditions, results = [], []
        for when, result in element.whens:
            if element.value is None:
                conditions.append(self.condition(when))
            else:
                conditions.append(compared(operators.eq, subject, self.read(when)).sql)
            results.append(self.read(result))
        otherwise = None if element.else_ is None else self.read(element.else_)
        kind = common_kind([*results, otherwise])
        whens = [
            (condition, as_kind(result, kind).sql)
            for condition, result in zip(conditions, results, strict=True)
        ]
        return Term(case(*whens, else_=as_kind(otherwise, kind).sql), kind)

    def _function(self, element: functions.Function[Any]) -> Part:
        if element.packagenames:
            refused(_EXPECTED, f"{shown(element)} in it")
        return called(element.name, [self.read(clause) for clause in element.clauses])

    def _binary(self, element: elements.BinaryExpression[Any]) -> Part:
        operator: Any = element.operator
        if operator in (operators.json_getitem_op, operators.json_path_getitem_op):
            return self._tag(element)
        left = self.read(element.left)
        if operator in _NEGATED:
            return Term(not_(self._operated(_NEGATED[operator], left, element)), "boolean")
        if operator in _ARITHMETIC:
            return calculated(operator, left, self.read(element.right))
        return Term(self._operated(operator, left, element), "boolean")

    def _chain(self, element: elements.ExpressionClauseList[Any]) -> Part:
        """Parse `a + b + c`, which SQLAlchemy stores as one flat list."""
        if element.operator not in _ARITHMETIC:
            refused(_EXPECTED, f"{shown(element)} in it")
        parts = [self.read(clause) for clause in element.clauses]
        return reduce(partial(calculated, element.operator), parts)

    def _operated(
        self, operator: Any, left: Part, element: elements.BinaryExpression[Any]
    ) -> ColumnElement[bool]:
        match operator:
            case operators.in_op:
                values = self._value(element.right)
                if not isinstance(values, list | tuple):
                    refused("a list of values in in_()", shown(element.right))
                return one_of(left, [constant(value) for value in values]).sql
            case operators.between_op if not element.modifiers.get("symmetric"):
                low, high = (self.read(clause) for clause in element.right.clauses)
                return and_(_compared(operators.ge, left, low), _compared(operators.le, left, high))
            case operators.is_:
                return self._is(left, self.read(element.right))
        if operator in _COMPARISONS:
            return _compared(operator, left, self.read(element.right))
        if operator in _MATCHING:
            form, fold = _MATCHING[operator]
            escape = element.modifiers.get("escape")
            return matching(left, self.read(element.right), form, escape, fold).sql
        return refused(_EXPECTED, f"{shown(element)} in it")

    def _is(self, left: Part, right: Part) -> ColumnElement[bool]:
        if right is None:
            return is_missing(left).sql
        wanted = as_kind(right, "boolean").sql
        if not isinstance(wanted, elements.True_ | elements.False_):
            refused("is_() with None, True or False", shown(wanted))
        return as_kind(left, "boolean").sql.is_(wanted)

    def _tag(self, element: elements.BinaryExpression[Any]) -> Part:
        path: list[str | int] = []
        inner: Any = element
        while type(inner) is elements.BinaryExpression:
            steps = self._value(inner.right)
            path[:0] = steps if isinstance(steps, list | tuple) else [steps]
            inner = inner.left
        is_tags = type(inner) is Column and _known_column(inner) is episode_group.c.tags
        if not is_tags or not 0 < len(path) <= MAX_STEPS:
            refused(f"tags[...], at most {MAX_STEPS} steps deep", shown(element))
        tag = Tag(tuple(_step(step) for step in path))
        if isinstance(element.type, Tags):
            return tag
        return as_kind(tag, _kind_of(element.type))


_STALENESS = Term(current_staleness(), "integer")


def _compared(operator: Operator, left: Part, right: Part) -> ColumnElement[bool]:
    """Compare two parts.

    The current staleness is computed, so it has no index. The stored column `staleness`, which
    is updated in steps, has one. If staleness is compared with a constant, a condition on the
    stored column is added, which can use the index.
    """
    condition = compared(operator, left, right).sql
    match right:
        case Term(BindParameter() as constant, "integer") if left is _STALENESS:
            if operator in (operators.lt, operators.le, operators.eq):
                condition &= episode_group.c.staleness <= _or_any(constant, checks.INT64[1])
            if operator in (operators.gt, operators.ge, operators.eq):
                condition &= episode_group.c.staleness >= _or_any(constant, checks.INT64[0])
    return condition


def _or_any(value: BindParameter[int], bound: int) -> ColumnElement[int]:
    """Return a constant, or while stored staleness is outdated, `bound`, which all rows meet."""
    behind = select(task.c.id).where(task.c.aged_to.is_not(None)).correlate(None).exists()
    return select(case((behind, bound), else_=value)).correlate(None).scalar_subquery()


#: Parsers of the nodes of a filter, by exact type: an instance of a subclass may compile to
#: anything.
_READERS: dict[type, Callable[[_Compiler, Any], Part]] = {
    Column: _Compiler._column,
    BindParameter: _Compiler._constant,
    elements.Null: lambda _compiler, _element: None,
    elements.True_: lambda _compiler, _element: constant(True),
    elements.False_: lambda _compiler, _element: constant(False),
    elements.Grouping: lambda compiler, element: compiler.read(element.element),
    elements.BooleanClauseList: _Compiler._boolean_list,
    elements.ExpressionClauseList: _Compiler._chain,
    elements.UnaryExpression: _Compiler._unary,
    elements.AsBoolean: _Compiler._unary,
    elements.BinaryExpression: _Compiler._binary,
    Case: _Compiler._case,
    functions.Function: _Compiler._function,
    functions.coalesce: _Compiler._function,
}
_COMPARISONS: frozenset[Operator] = frozenset({
    operators.eq, operators.ne, operators.lt, operators.le, operators.gt, operators.ge,
})  # fmt: skip
_ARITHMETIC: frozenset[Operator] = frozenset({
    operators.add, operators.sub, operators.mul, operators.truediv, operators.mod,
    operators.concat_op,
})  # fmt: skip
#: Patterns, and whether they ignore case.
_MATCHING: dict[Operator, tuple[str, bool]] = {
    operators.like_op: ("{}", False),
    operators.ilike_op: ("{}", True),
    operators.startswith_op: ("{}%", False),
    operators.istartswith_op: ("{}%", True),
    operators.endswith_op: ("%{}", False),
    operators.iendswith_op: ("%{}", True),
    operators.contains_op: ("%{}%", False),
    operators.icontains_op: ("%{}%", True),
}
#: Negated operators, and the operator that each negates.
_NEGATED: dict[Operator, Operator] = {operators.is_not: operators.is_} | {
    getattr(operators, f"not_{name}"): getattr(operators, name)
    for name in ("in_op", "between_op", *(matches.__name__ for matches in _MATCHING))
}
#: Types of columns, and those that as_string() and similar methods give to a tag.
_KINDS: tuple[tuple[type[TypeEngine[Any]], Kind], ...] = (
    (String, "text"),
    (Integer, "integer"),
    (Double, "number"),
    (Float, "number"),
    (Boolean, "boolean"),
    (UtcDateTime, "time"),
)


def _kind_of(sql_type: TypeEngine[Any]) -> Kind:
    for kind_of_type, kind in _KINDS:
        if isinstance(sql_type, kind_of_type):
            return kind
    return refused("as_string(), as_integer(), as_float() or as_boolean()", repr(sql_type))


def _is_known(sql_type: TypeEngine[Any]) -> bool:
    """Whether a type is ours or SQLAlchemy's. Conversions by a caller's own type would be lost."""
    known = type(sql_type)
    return known in (Tags, UtcDateTime) or known.__module__.startswith("sqlalchemy.")


def _step(step: object) -> str | int:
    """Check a step of a path: the key of an object, or a position in an array."""
    if isinstance(step, str):
        return checks.string("where", step)
    return checks.whole_number("where", step, 0, checks.INT32[1])
