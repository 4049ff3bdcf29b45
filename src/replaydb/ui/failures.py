"""Errors as pages: what was wrong, without what nobody is to see."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from replaydb.database import migrations
from replaydb.errors import (
    CorruptPayloadError,
    DatabaseError,
    DatabaseUnavailableError,
    InvalidInputError,
    InvalidSettingsError,
    PayloadsUnavailableError,
    ReplayDBError,
    SchemaError,
)
from replaydb.ui.pages import page, store_of

logger = logging.getLogger(__name__)

HEADINGS = {
    400: "That address does not work",
    401: "Who is there?",
    403: "Not for you",
    404: "Not here",
    405: "Only to be looked at",
    413: "Too much at once",
    414: "That address is too long",
    421: "Not by that name",
    500: "Something went wrong",
    503: "The store does not answer",
    504: "That took too long",
}


#: Of what is not for everybody who may look.
LOGGED = "The log of `replaydb ui` says more."


def failure(request: Request, status: int, reason: str, **headers: str) -> Response:
    """A page that says what is wrong."""
    heading = HEADINGS.get(status, "That did not work")
    answer = page(request, "error.html", status=status, heading=heading, reason=reason)
    answer.headers.update({name.replace("_", "-"): value for name, value in headers.items()})
    return answer


async def _typed(request: Request, error: Exception) -> Response:
    if isinstance(error, InvalidInputError | InvalidSettingsError):
        return failure(request, 400, str(error))
    if isinstance(error, LookupError):
        return failure(request, 404, str(error))
    if isinstance(error, DatabaseError):  # which says where the database is
        error = await _reason(request, error)
        logger.warning("%s: %s", request.url.path, error)
        if isinstance(error, SchemaError):
            reason = f"Its tables are not of revision {error.expected}, which is needed. {LOGGED}"
            return failure(request, 503, reason, Retry_After="5")
        if isinstance(error, DatabaseUnavailableError):
            outside = isinstance(error, PayloadsUnavailableError)  # and has no secrets
            reason = f"Tokens cannot be read: {error}" if outside else LOGGED
            return failure(request, 503, reason, Retry_After="5")
        if _is_about_a_value(error):
            reason = "What is asked for makes a number that is too large, or none."
            return failure(request, 400, reason)
        return failure(request, 500, LOGGED)
    if not isinstance(error, CorruptPayloadError):
        logger.warning("%s: %s", request.url.path, error)
    return failure(request, 500, str(error))


async def _reason(request: Request, error: DatabaseError) -> DatabaseError:
    """What an error comes from: tables may be gone, or others, since the store was opened."""
    if type(error) is DatabaseError:
        try:
            await migrations.prepare(store_of(request)._database.backend, migrate=False)
        except DatabaseError as reason:
            return reason
    return error


def _is_about_a_value(error: Exception) -> bool:
    """A data exception of PostgreSQL: such as a sum in a filter that overflows."""
    cause = getattr(error.__cause__, "orig", error.__cause__)
    return str(getattr(cause, "sqlstate", "")).startswith("22")


async def _of_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101
    answer = failure(request, error.status_code, error.detail)
    answer.headers.update(error.headers or {})
    return answer


async def _unexpected(request: Request, error: Exception) -> Response:
    return failure(request, 500, LOGGED)


HANDLERS: Mapping[Any, Any] = {
    ReplayDBError: _typed,
    HTTPException: _of_http,
    Exception: _unexpected,
}
