"""Types of columns: what both engines store alike, and read alike, damaged or not."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

from sqlalchemy import JSON, BigInteger, DateTime, Dialect, Integer, String, Text, TypeDecorator
from sqlalchemy.sql.operators import OperatorClass, OperatorType
from sqlalchemy.types import TypeEngine

from replaydb import escapes


@dataclass(frozen=True, slots=True)
class Damaged:
    """What stands in a column of SQLite, which takes anything, where it can not be."""

    value: object

    def __str__(self) -> str:
        return f"{self.value!r:.80}"


def tolerant(read: Callable[[Any], Any] | None) -> Callable[[Any], Any]:
    """One damaged value must not make all rows that are read with it unreadable."""

    def process(value: Any) -> Any:
        try:
            return value if read is None else read(value)
        except (ValueError, TypeError):
            return Damaged(value)

    return process


class UtcDateTime(TypeDecorator[datetime]):
    """Aware datetimes in UTC on both engines (SQLite keeps no zone), or `Damaged`."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def bind_processor(self, dialect: Dialect) -> Callable[[Any], Any]:
        """Only aware values are taken."""
        if dialect.name == "sqlite":
            return lambda value: None if value is None else _text_of(value.astimezone(UTC))
        return lambda value: None if value is None else value.astimezone(UTC)

    def result_processor(self, dialect: Dialect, coltype: object) -> Callable[[Any], Any] | None:
        """Never raises."""
        if dialect.name != "sqlite":
            return None
        return tolerant(lambda value: None if value is None else _of_text(value))


# Many rows that are written, or read, together have the same times. They are remembered in UTC:
# elsewhere the two hours when clocks are set back are equal.
@lru_cache(maxsize=1024)
def _text_of(value: datetime) -> str:
    return value.replace(tzinfo=None).isoformat(" ", "microseconds")


@lru_cache(maxsize=1024)
def _of_text(value: str) -> datetime:
    """Put back the zone that SQLite dropped."""
    read = datetime.fromisoformat(value)
    return read.replace(tzinfo=UTC) if read.tzinfo is None else read


class Tags(TypeDecorator[Any]):
    """JSON, or `Damaged`; a filter may ask it for anything: `filters` says what that means."""

    impl = JSON
    cache_ok = True
    operator_classes = OperatorClass.ANY

    def coerce_compared_value(self, op: OperatorType | None, value: Any) -> Any:
        """A step of a path is no JSON."""
        return self.impl_instance.coerce_compared_value(op, value)

    def result_processor(self, dialect: Dialect, coltype: object) -> Callable[[Any], Any]:
        """Never raises."""
        if dialect.name != "sqlite":
            return tolerant(super().result_processor(dialect, coltype))
        # Of bytes `json.loads` would find out the encoding first.
        return tolerant(
            lambda value: (
                json.loads(str(value, "utf8") if isinstance(value, bytes) else value)
                if value is not None
                else None
            )
        )


class GeneratedText(TypeDecorator[str]):
    """Text of a model: see `replaydb.escapes`."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        """Escaped."""
        return None if value is None else escapes.escape(value)

    def process_result_value(self, value: Any, dialect: Dialect) -> Any:
        """What was bound; SQLite may have something else than text."""
        return escapes.unescape(value) if isinstance(value, str) else value


class GeneratedJson(TypeDecorator[Any]):
    """JSON whose strings may be text of a model."""

    impl = JSON(none_as_null=True)
    cache_ok = True

    def bind_processor(self, dialect: Dialect) -> Callable[[Any], Any]:
        """Its strings escaped."""
        return lambda value: None if value is None else escapes.to_json(value)

    def process_result_value(self, value: Any, dialect: Dialect) -> Any:
        """What was bound."""
        return escapes.unescaped(value)


def is_json(kind: TypeEngine[Any]) -> bool:
    """Whether a column of a type holds JSON."""
    return isinstance(kind, JSON | Tags | GeneratedJson)


def kept(text: str) -> str | bytes:
    """JSON as a column of SQLite keeps it: of a text that is a number it would make one of its own.

    That has 64 bits, and is an integer wherever it can be one.
    """
    return text.encode() if text[:1] in "-0123456789" else text


class _KeptJson(TypeDecorator[Any]):
    """JSON that may be a number as a whole."""

    impl = JSON(none_as_null=True)
    cache_ok = True

    def bind_processor(self, dialect: Dialect) -> Callable[[Any], Any]:
        """As bytes, if it is one; they are read like text."""
        write = super().bind_processor(dialect)
        assert write is not None  # noqa: S101
        return lambda value: kept(write(value))


# Only 64-bit INTEGER PRIMARY KEY is the rowid, and so free, on SQLite.
Id = BigInteger().with_variant(Integer(), "sqlite")
# Not JSONB, which reads 1e16 back as an integer and -0.0 as 0.0.
Json = JSON(none_as_null=True)
AnyJson = Json.with_variant(_KeptJson(), "sqlite")
Name = String(255)
