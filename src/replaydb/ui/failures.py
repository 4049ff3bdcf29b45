"""Error pages. They contain the reason, but no connection details or internals."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from replaydb.database import migrations
from replaydb.errors import (
    ClientTooOldError,
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
    400: "Bad request",
    401: "Sign in",
    403: "Forbidden",
    404: "Not found",
    405: "Read-only",
    413: "Request too large",
    414: "URL too long",
    421: "Host not allowed",
    500: "Internal error",
    503: "Store unavailable",
    504: "Timeout",
}


#: Reason of errors whose details must not be shown to every client.
LOGGED = "See the log of `replaydb ui` for details."


def failure(request: Request, status: int, reason: str, **headers: str) -> Response:
    """Return an error page."""
    heading = HEADINGS.get(status, "Request failed")
    answer = page(request, "error.html", status=status, heading=heading, reason=reason)
    answer.headers.update({name.replace("_", "-"): value for name, value in headers.items()})
    return answer


async def _replaydb_error(request: Request, error: Exception) -> Response:
    if isinstance(error, InvalidInputError | InvalidSettingsError):
        return failure(request, 400, str(error))
    if isinstance(error, LookupError):
        return failure(request, 404, str(error))
    if isinstance(error, DatabaseError):  # its message may contain the database's address
        error = await _cause(request, error)
        logger.warning("%s: %s", request.url.path, error)
        if isinstance(error, ClientTooOldError):
            return failure(request, 503, str(error))
        if isinstance(error, SchemaError):
            reason = f"The schema of the database is not at revision {error.expected}. {LOGGED}"
            return failure(request, 503, reason, Retry_After="5")
        if isinstance(error, DatabaseUnavailableError):
            # The message about a payload store contains no credentials.
            has_reason = isinstance(error, PayloadsUnavailableError)
            reason = f"Tokens cannot be read: {error}" if has_reason else LOGGED
            return failure(request, 503, reason, Retry_After="5")
        if _is_data_exception(error):
            reason = "The filter computes a number that is too large or undefined."
            return failure(request, 400, reason)
        return failure(request, 500, LOGGED)
    if not isinstance(error, CorruptPayloadError):
        logger.warning("%s: %s", request.url.path, error)
    return failure(request, 500, str(error))


async def _cause(request: Request, error: DatabaseError) -> DatabaseError:
    """Return a schema error if tables were dropped or migrated since the store was opened."""
    if type(error) is DatabaseError:
        try:
            await migrations.prepare(store_of(request)._database.backend, migrate=False)
        except DatabaseError as reason:
            return reason
    return error


def _is_data_exception(error: Exception) -> bool:
    """Whether it is a PostgreSQL data exception, such as an overflow in a filter."""
    cause = getattr(error.__cause__, "orig", error.__cause__)
    return str(getattr(cause, "sqlstate", "")).startswith("22")


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101
    answer = failure(request, error.status_code, error.detail)
    answer.headers.update(error.headers or {})
    return answer


async def _unexpected(request: Request, error: Exception) -> Response:
    return failure(request, 500, LOGGED)


HANDLERS: Mapping[Any, Any] = {
    ReplayDBError: _replaydb_error,
    HTTPException: _http_error,
    Exception: _unexpected,
}
