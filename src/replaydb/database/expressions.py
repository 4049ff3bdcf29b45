"""SQL that both engines have, in different words: see `sqlite_sql.py` and `postgresql_sql.py`."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Self

from sqlalchemy import (
    ARRAY,
    BigInteger,
    BindParameter,
    Boolean,
    ColumnElement,
    Dialect,
    Double,
    Integer,
    Label,
    String,
    Text,
    TypeDecorator,
    bindparam,
    cast,
    func,
)
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.sql.operators import OperatorType


def total(column: ColumnElement[int], name: str) -> Label[int]:
    """The sum of a column of integers, which is none on PostgreSQL unless that is said."""
    return cast(func.sum(column), BigInteger).label(name)


class _JsonList(TypeDecorator[Sequence[Any]]):
    """A list as JSON text, for engines without arrays."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Sequence[Any] | None, dialect: Dialect) -> str:
        return json.dumps(list(value or ()))


_IDS = _JsonList().with_variant(ARRAY(BigInteger), "postgresql")
_NAMES = _JsonList().with_variant(ARRAY(String), "postgresql")


class _Pattern(TypeDecorator[str]):
    """A LIKE pattern whose escape character is a backslash; what PostgreSQL's LIKE takes."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        if value is None or dialect.name != "sqlite":
            return value
        return re.sub(r"\\?.", _globbed, value, flags=re.DOTALL)


def _globbed(part: re.Match[str]) -> str:
    """What a part of a LIKE pattern is in a GLOB pattern; SQLite's LIKE ignores case."""
    if part[0] in _WILDCARDS:
        return _WILDCARDS[part[0]]
    character = part[0][-1]
    return f"[{character}]" if character in "*?[" else character


_WILDCARDS = {"%": "*", "_": "?"}


class seconds_between(FunctionElement[float]):
    """Seconds from one time to another; both are columns, or parameters of their type."""

    name = "seconds_between"
    type = Double()
    inherit_cache = True


class as_stored(FunctionElement[Any]):
    """A column of text, read as whatever bytes are there."""

    name = "as_stored"
    inherit_cache = True

    def __init__(self, column: ColumnElement[Any]) -> None:
        super().__init__(column)
        self.type = column.type


class json_as_stored(FunctionElement[Any]):
    """A column of JSON, read as the text that is there."""

    name = "json_as_stored"
    type = Text()
    inherit_cache = True


class among(FunctionElement[bool]):
    """`column IN values`: one bound parameter and one statement, however many values there are."""

    name = "among"
    type = Boolean()
    inherit_cache = True

    def __init__(
        self,
        column: ColumnElement[Any],
        values: Sequence[int] | Sequence[str] | BindParameter[Any],
    ) -> None:
        kind = _IDS if isinstance(column.type, Integer) else _NAMES
        if isinstance(values, BindParameter):  # given when it is run
            bound = bindparam(values.key, type_=kind)
        else:
            bound = bindparam(None, values, type_=kind, unique=True)
        super().__init__(column, bound)

    def self_group(self, against: OperatorType | None = None) -> Self:
        """As it is. SQLAlchemy would add `= 1` on SQLite, and no index would be used any more."""
        return self


class comes_after(FunctionElement[bool]):
    """`column = value AND id > last`, as a range of the index that ends with both, and no other."""

    name = "comes_after"
    type = Boolean()
    inherit_cache = True

    def __init__(
        self,
        column: ColumnElement[Any],
        value: ColumnElement[Any],
        id_column: ColumnElement[int],
        last: BindParameter[Any] | int,
    ) -> None:
        if isinstance(last, BindParameter):  # given when it is run
            bound = bindparam(last.key, type_=id_column.type)
        else:
            bound = bindparam(None, last, type_=id_column.type, unique=True)
        super().__init__(column, value, id_column, bound)

    def self_group(self, against: OperatorType | None = None) -> Self:
        """As it is, for the reason that `among` has."""
        return self


class comes_before(comes_after):
    """`column = value AND id < last`, in the same way."""

    name = "comes_before"
    inherit_cache = True


class json_part(FunctionElement[Any]):
    """What stands at a path of a JSON column, if it is of one kind; NULL for any other.

    The path is an object's key (text) or an array's position (from 0) at every step. The subclasses
    are the kinds.
    """

    inherit_cache = True

    def __init__(self, column: ColumnElement[Any], path: Sequence[str | int]) -> None:
        kinds = (Text() if isinstance(step, str) else Integer() for step in path)
        steps = zip(path, kinds, strict=True)
        self.path = tuple(path)
        super().__init__(
            column, *(bindparam(None, step, kind, unique=True) for step, kind in steps)
        )


class json_text(json_part):
    """A string."""

    name = "json_text"
    type = Text()
    inherit_cache = True


class json_integer(json_part):
    """A number that is written as an integer and fits into 64 bits."""

    name = "json_integer"
    type = BigInteger()
    inherit_cache = True


class json_double(json_part):
    """Any number, as the nearest double."""

    name = "json_double"
    type = Double()
    inherit_cache = True


class json_boolean(json_part):
    """True or false."""

    name = "json_boolean"
    type = Boolean()
    inherit_cache = True


class json_kind(json_part):
    """The name of its kind, as the engine calls it, for anything but null: it is there."""

    name = "json_kind"
    type = Text()
    inherit_cache = True


class matches(FunctionElement[bool]):
    """`text LIKE pattern`, with regard to case; a backslash escapes."""

    name = "matches"
    type = Boolean()
    inherit_cache = True

    def __init__(self, text: ColumnElement[str], pattern: str) -> None:
        super().__init__(text, bindparam(None, pattern, _Pattern(), unique=True))


class bytewise(FunctionElement[str]):
    """A text that is ordered, and made lower or upper case, by its bytes: no locale has a say."""

    name = "bytewise"
    type = Text()
    inherit_cache = True
