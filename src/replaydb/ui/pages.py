"""Templates, URLs and request parameters shared by all views."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import HTMLResponse

from replaydb.buffer import Buffer
from replaydb.buffer.store import Store
from replaydb.domain import checks
from replaydb.domain.monitoring import end
from replaydb.errors import InvalidInputError
from replaydb.ui import library
from replaydb.util.display import human_seconds, human_size, visible

T = TypeVar("T", bound=str)
V = TypeVar("V")
R = TypeVar("R")

FOLDER = Path(__file__).parent

#: Views in the navigation bar, with their labels.
NAVIGATION = {"": "Overview", "groups": "Groups", "runs": "Runs"}
#: Views of the navigation bar that need a buffer.
BUFFER_VIEWS = {"groups"}


def page(request: Request, template: str, *, status: int = 200, **variables: Any) -> HTMLResponse:
    """Return a rendered template as a response.

    Args:
        request: The request.
        template: File name of the template.
        status: HTTP status.
        variables: Variables of the template. Their text is escaped and its control characters are
            made visible, so that text from models cannot inject markup.
    """
    return HTMLResponse(rendered(request, template, **variables), status)


def rendered(request: Request, template: str, **variables: Any) -> Markup:
    """Render a template. The arguments are those of `page`."""
    # URLs are relative, so that the pages also work behind a proxy that adds a path prefix.
    up = "../" * (request.url.path.count("/") - 1)
    text = _ENVIRONMENT.get_template(template).render(
        {
            "address": partial(address, up=up),
            "asset": lambda name: f"{up}{name}",
            "buffer_name": request.query_params.get("buffer"),
            "view": request.url.path.strip("/"),
            **variables,
        }
    )
    return Markup(text)  # noqa: S704 - the template escapes its variables


def as_json(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the values of a JSON object as JSON text."""
    return {name: json.dumps(value, ensure_ascii=False) for name, value in values.items()}


def address(view: str, *, up: str = "", **query: object) -> str:
    """Return the relative URL of a view.

    Args:
        view: Name of the view, "" for the overview.
        up: Relative path from the current page to the root.
        query: Query parameters. None omits a parameter; a list repeats it.
    """
    encoded = urlencode({name: it for name, it in query.items() if it is not None}, doseq=True)
    return f"{up or './'}{quote(view)}{'?' if encoded else ''}{encoded}"


def store_of(request: Request) -> Store:
    """Return the open store."""
    store: Store = request.app.state.store
    return store


async def buffer_of(request: Request) -> Buffer:
    """Return the buffer of the query parameter `buffer`.

    Raises:
        InvalidInputError: The parameter is missing.
        UnknownBufferError: There is no such buffer.
    """
    return await store_of(request).buffer(text_of(request, "buffer"), create=False)


def text_of(request: Request, name: str) -> str:
    """Return a required query parameter.

    Raises:
        InvalidInputError: The parameter is missing or empty.
    """
    value = request.query_params.get(name)
    if not value:
        raise InvalidInputError(name, "a value in the query string", "none")
    return value


def number_of(request: Request, name: str) -> int:
    """Return a required query parameter that is an integer.

    Raises:
        InvalidInputError: The parameter is missing, or is not a non-negative integer.
    """
    value = text_of(request, name)
    try:
        number = int(value)
    except ValueError:
        raise InvalidInputError(name, "an integer", repr(value)) from None
    return checks.whole_number(name, number)


def optional_number(request: Request, name: str) -> int | None:
    """Return an optional query parameter that is an integer.

    Raises:
        InvalidInputError: The parameter is not a non-negative integer.
    """
    return number_of(request, name) if request.query_params.get(name) else None


def choice_of(request: Request, name: str, choices: Sequence[T]) -> T:
    """Return an optional query parameter that is one of the choices; the default is the first.

    Raises:
        InvalidInputError: The parameter is none of the choices.
    """
    return checks.one_of(name, request.query_params.get(name) or choices[0], choices)


def _finalize(value: object) -> object:
    """Format a template expression.

    None is "-", control characters of text are made visible, integers have thousands separators,
    floats four digits.
    """
    if value is None:
        return "-"
    if isinstance(value, str) and not isinstance(value, Markup):
        return visible(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else value


def _known(formatted: Callable[[V], R]) -> Callable[[V | None], R | None]:
    """Return a filter that formats a value and leaves None as it is."""
    return lambda value: None if value is None else formatted(value)


def _behind(lag: float) -> str:
    if lag == math.inf:
        return "which is not connected to a primary"
    return f"{human_seconds(lag)} behind its primary"


def _when(time: datetime) -> Markup:
    """Format a time in UTC together with its distance from now."""
    ago = (datetime.now(UTC) - time).total_seconds()
    distance = f"{human_seconds(ago)} ago" if ago >= 0 else f"in {human_seconds(-ago)}"
    return Markup('<time datetime="{}">{:%Y-%m-%d %H:%M:%S} UTC</time> <small>({})</small>').format(
        time.isoformat(), time, distance
    )


def _at(time: datetime) -> Markup:
    """Format a time for a table that states the time zone; it can wrap between date and time."""
    return Markup('<time datetime="{}">{:%Y-%m-%d}</time> <time>{:%H:%M:%S}</time>').format(
        time.isoformat(), time, time
    )


_ENVIRONMENT = Environment(
    loader=PackageLoader("replaydb.ui"),
    autoescape=True,
    undefined=StrictUndefined,
    finalize=_finalize,
    trim_blocks=True,
    lstrip_blocks=True,
)
_ENVIRONMENT.globals |= {
    "as_json": as_json,
    "navigation": NAVIGATION,
    "buffer_views": BUFFER_VIEWS,
    "plotly": library.PATH,
    "plotly_styles": library.styles,
}
_ENVIRONMENT.filters |= {
    "at": _known(_at),
    "behind": _behind,
    "end": end,
    "percent": _known("{:.1%}".format),
    "seconds": _known(human_seconds),
    "size": _known(human_size),
    "when": _known(_when),
}
