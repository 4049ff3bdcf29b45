"""SQL expressions that compile differently per engine: `sqlite/sql.py`, `postgresql/sql.py`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Self, TypeVar

from sqlalchemy import (
    ARRAY,
    BigInteger,
    BindParameter,
    Boolean,
    ColumnElement,
    DateTime,
    Dialect,
    Double,
    Integer,
    Label,
    String,
    Text,
    TypeDecorator,
    bindparam,
    case,
    cast,
    func,
)
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.sql.operators import OperatorType
from sqlalchemy.types import TypeEngine

T = TypeVar("T")


def compile_as(engine: str, templates: Mapping[type[Any], str]) -> None:
    """Compile expressions on an engine to templates, in which {0} is the first operand."""
    for kind, template in templates.items():

        def compiled(
            element: Any, compiler: SQLCompiler, *, template: str = template, **kw: Any
        ) -> str:
            return template.format(*(compiler.process(one, **kw) for one in element.clauses))

        compiles(kind, engine)(compiled)


def total(column: ColumnElement[int], name: str) -> Label[int]:
    """Return the sum of an integer column as an integer. PostgreSQL's `sum` returns NUMERIC."""
    return cast(func.sum(column), BigInteger).label(name)


def number_of(condition: ColumnElement[bool]) -> ColumnElement[int]:
    """Return the number of rows that meet a condition. An aggregate."""
    return func.count(case((condition, 1)))


def total_or_zero(column: Any) -> Any:
    """Return the sum of an integer column as an integer; 0 without rows."""
    return cast(func.coalesce(func.sum(column), 0), BigInteger)


class _JsonList(TypeDecorator[Sequence[Any]]):
    """A list as JSON text, for engines without arrays."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Sequence[Any] | None, dialect: Dialect) -> str:
        return json.dumps(list(value or ()))


_IDS = _JsonList().with_variant(ARRAY(BigInteger), "postgresql")
_NAMES = _JsonList().with_variant(ARRAY(String), "postgresql")


class _Pattern(TypeDecorator[str]):
    """A LIKE pattern with a backslash as its escape character, as PostgreSQL's LIKE takes it."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        if value is None or dialect.name != "sqlite":
            return value
        return re.sub(r"\\?.", _globbed, value, flags=re.DOTALL)


def _globbed(part: re.Match[str]) -> str:
    """Return a part of a LIKE pattern as a GLOB pattern, because SQLite's LIKE ignores case."""
    if part[0] in _WILDCARDS:
        return _WILDCARDS[part[0]]
    character = part[0][-1]
    return f"[{character}]" if character in "*?[" else character


_WILDCARDS = {"%": "*", "_": "?"}


class Expression(FunctionElement[T]):
    """Base of expressions, which are named like their class. Statements with them are cached."""

    name: str

    def __init_subclass__(cls, **kw: Any) -> None:
        cls.name = cls.__name__
        cls.inherit_cache = True
        super().__init_subclass__(**kw)


class server_time(Expression[datetime]):
    """Time of the clock of the server when this is evaluated; NULL if there is no server."""

    type = DateTime(timezone=True)


class next_draw_id(Expression[int]):
    """A new id for a draw; NULL where only the insertion of a row generates ids."""

    type = BigInteger()


class next_lease_id(next_draw_id):
    """A new id for a lease, in the same way."""


class in_turn(Expression[bool]):
    """True once a lock was granted in the order of arrival, until the transaction ends.

    The arguments are the kind of the lock and an id. PostgreSQL grants advisory locks in this
    order. A row lock has no such order if its holders update the row: each of their commits wakes
    all transactions that wait for it. SQLite has one writer and needs no lock.
    """

    type = Boolean()


class joined(Expression[str]):
    """The integers of a column as one text, separated by commas. An aggregate."""

    type = Text()


class seconds_between(Expression[float]):
    """Seconds from one time to another. Both are columns, or parameters of their type."""

    type = Double()


class as_stored(Expression[Any]):
    """A text column, read as the bytes that are stored."""

    def __init__(self, column: ColumnElement[Any]) -> None:
        super().__init__(column)
        self.type = column.type


class json_as_stored(Expression[Any]):
    """A JSON column, read as the text that is stored."""

    type = Text()


class Condition(Expression[bool]):
    """Base of conditions that an index can find and that need no parentheses."""

    type = Boolean()

    def self_group(self, against: OperatorType | None = None) -> Self:
        """Return self. SQLAlchemy would add `= 1` on SQLite, and so prevent the use of indexes."""
        return self


def _bound(value: Any, kind: TypeEngine[Any]) -> BindParameter[Any]:
    """Bind a value now, or that of a parameter when the statement runs."""
    if isinstance(value, BindParameter):
        return bindparam(value.key, type_=kind)
    return bindparam(None, value, type_=kind, unique=True)


class among(Condition):
    """`column IN values`, with one bound parameter and one statement for any number of values."""

    def __init__(
        self,
        column: ColumnElement[Any],
        values: Sequence[int] | Sequence[str] | BindParameter[Any],
    ) -> None:
        kind = _IDS if isinstance(column.type, Integer) else _NAMES
        super().__init__(column, _bound(values, kind))


class comes_after(Condition):
    """`column = value AND id > last`, as a range of the index that ends with both columns."""

    def __init__(
        self,
        column: ColumnElement[Any],
        value: ColumnElement[Any],
        id_column: ColumnElement[int],
        last: BindParameter[Any] | int,
    ) -> None:
        super().__init__(column, value, id_column, _bound(last, id_column.type))


class comes_before(comes_after):
    """`column = value AND id < last`, as a range of the same index."""


class json_part(Expression[Any]):
    """The value at a path of a JSON column if it has the kind of the subclass; else NULL.

    Each step of the path is the key of an object (text) or a position in an array (from 0).
    """

    def __init__(self, column: ColumnElement[Any], path: Sequence[str | int]) -> None:
        kinds = (Text() if isinstance(step, str) else Integer() for step in path)
        steps = zip(path, kinds, strict=True)
        self.path = tuple(path)
        super().__init__(
            column, *(bindparam(None, step, kind, unique=True) for step, kind in steps)
        )


class json_text(json_part):
    """A string."""

    type = Text()


class json_integer(json_part):
    """A number that is written as an integer and fits into 64 bits."""

    type = BigInteger()


class json_double(json_part):
    """Any number, as the nearest double."""

    type = Double()


class json_boolean(json_part):
    """True or false."""

    type = Boolean()


class json_kind(json_part):
    """The engine's name of the kind of a value other than null, to test that it exists."""

    type = Text()


class matches(Expression[bool]):
    """`text LIKE pattern`, case-sensitive, with a backslash as the escape character."""

    type = Boolean()

    def __init__(self, text: ColumnElement[str], pattern: str) -> None:
        super().__init__(text, bindparam(None, pattern, _Pattern(), unique=True))


class bytewise(Expression[str]):
    """A text whose order and case conversion use its bytes, independent of any locale."""

    type = Text()
