"""SQL that both engines have in different words; each engine's module says how it is written."""

from __future__ import annotations

import json
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
    String,
    Text,
    TypeDecorator,
    bindparam,
)
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.sql.operators import OperatorType


class _JsonList(TypeDecorator[Sequence[Any]]):
    """A list as JSON text, for engines without arrays."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Sequence[Any] | None, dialect: Dialect) -> str:
        return json.dumps(list(value or ()))


_IDS = _JsonList().with_variant(ARRAY(BigInteger), "postgresql")
_NAMES = _JsonList().with_variant(ARRAY(String), "postgresql")


class seconds_between(FunctionElement[float]):
    """Seconds from one time to another; both are columns, or parameters of their type."""

    name = "seconds_between"
    type = Double()
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
        kind = _IDS if isinstance(column.type, BigInteger) else _NAMES
        if isinstance(values, BindParameter):  # given when it is run
            bound = bindparam(values.key, type_=kind)
        else:
            bound = bindparam(None, values, type_=kind, unique=True)
        super().__init__(column, bound)

    def self_group(self, against: OperatorType | None = None) -> Self:
        """As it is. SQLAlchemy would add `= 1` on SQLite, and no index would be used any more."""
        return self
