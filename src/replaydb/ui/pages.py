"""What all views share: templates and how they show values, addresses, what a request asks for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import HTMLResponse

from replaydb import checks
from replaydb.buffer import Buffer
from replaydb.display import human_seconds, human_size, visible
from replaydb.errors import InvalidInputError
from replaydb.store import Store
from replaydb.ui import library

T = TypeVar("T", bound=str)

FOLDER = Path(__file__).parent

#: What the navigation leads to: names of views, and what they are called there.
NAVIGATION = {"": "Overview", "groups": "Groups", "runs": "Runs"}
#: Those that are about one buffer.
OF_A_BUFFER = {"groups"}


def page(request: Request, template: str, *, status: int = 200, **shown: Any) -> HTMLResponse:
    """An answer made of a template.

    Args:
        request: What is answered.
        template: Its file name.
        status: Of HTTP.
        shown: What the template speaks of. Texts are escaped there, and control signs made
            visible: nothing that a model wrote is run.
    """
    return HTMLResponse(rendered(request, template, **shown), status)


def rendered(request: Request, template: str, **shown: Any) -> Markup:
    """What a template says; arguments as of `page`."""
    # Addresses are relative, so that the pages also work behind a proxy that adds a prefix.
    up = "../" * (request.url.path.count("/") - 1)
    text = _ENVIRONMENT.get_template(template).render(
        {
            "address": partial(address, up=up),
            "asset": lambda name: f"{up}{name}",
            "buffer_name": request.query_params.get("buffer"),
            "view": request.url.path.strip("/"),
            **shown,
        }
    )
    return Markup(text)  # noqa: S704 - the template has escaped what is not


def as_json(values: Mapping[str, Any]) -> dict[str, str]:
    """The values of a JSON object as text."""
    return {name: json.dumps(value, ensure_ascii=False) for name, value in values.items()}


def address(view: str, *, up: str = "", **query: object) -> str:
    """Where a view shows something; what is None is left out, a list is said several times.

    Args:
        view: Its name, "" for the overview.
        up: How the page that refers to it gets to the root.
        query: What it is to show.
    """
    said = urlencode({name: it for name, it in query.items() if it is not None}, doseq=True)
    return f"{up or './'}{quote(view)}{'?' if said else ''}{said}"


def store_of(request: Request) -> Store:
    """The open store."""
    store: Store = request.app.state.store
    return store


async def buffer_of(request: Request) -> Buffer:
    """The buffer that the address names.

    Raises:
        InvalidInputError: It names none.
        UnknownBufferError: There is no such buffer.
    """
    return await store_of(request).buffer(text_of(request, "buffer"), create=False)


def text_of(request: Request, name: str) -> str:
    """A text that the address has to say.

    Raises:
        InvalidInputError: It does not.
    """
    said = request.query_params.get(name)
    if not said:
        raise InvalidInputError(name, "a value in the address", "none")
    return said


def number_of(request: Request, name: str) -> int:
    """A whole number that the address has to say.

    Raises:
        InvalidInputError: It does not.
    """
    said = text_of(request, name)
    try:
        number = int(said)
    except ValueError:
        raise InvalidInputError(name, "a whole number", repr(said)) from None
    return checks.whole_number(name, number)


def optional_number(request: Request, name: str) -> int | None:
    """A whole number that the address may say.

    Raises:
        InvalidInputError: It says something else.
    """
    return number_of(request, name) if request.query_params.get(name) else None


def choice_of(request: Request, name: str, choices: Sequence[T]) -> T:
    """One of several words that the address may say, or the first of them.

    Raises:
        InvalidInputError: It says something else.
    """
    said = request.query_params.get(name) or choices[0]
    for choice in choices:
        if choice == said:
            return choice
    raise InvalidInputError(name, f"one of {', '.join(choices)}", repr(said))


def _finalize(value: object) -> object:
    """What an expression of a template puts on the page."""
    if value is None:
        return "-"
    if isinstance(value, str) and not isinstance(value, Markup):
        return visible(value)
    return _number(value) if isinstance(value, int | float) else value


def _number(value: object) -> object:
    """Whole numbers whole, others in four digits."""
    if isinstance(value, bool) or value is None:
        return value
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{share:.1%}"


def _seconds(seconds: float | None) -> str | None:
    return None if seconds is None else human_seconds(seconds)


def _size(num_bytes: float | None) -> str | None:
    return None if num_bytes is None else human_size(num_bytes)


def _when(time: datetime | None) -> Markup | None:
    """A time in UTC, and how long ago that is."""
    if time is None:
        return None
    ago = (datetime.now(UTC) - time).total_seconds()
    said = f"{human_seconds(ago)} ago" if ago >= 0 else f"in {human_seconds(-ago)}"
    return Markup('<time datetime="{}">{:%Y-%m-%d %H:%M:%S} UTC</time> <small>({})</small>').format(
        time.isoformat(), time, said
    )


def _at(time: datetime | None) -> Markup | None:
    """A time in UTC, where that is said besides; it may be cut between day and hour."""
    if time is None:
        return None
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
    "of_a_buffer": OF_A_BUFFER,
    "plotly": library.PATH,
    "plotly_styles": library.styles,
}
_ENVIRONMENT.filters |= {
    "at": _at,
    "percent": _percent,
    "seconds": _seconds,
    "size": _size,
    "when": _when,
}
