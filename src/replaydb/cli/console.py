"""Shared parts of all commands: options, opening stores, tables, JSON, progress and errors."""

from __future__ import annotations

import asyncio
import io
import json
import math
import os
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from typer.core import TyperGroup

from replaydb.util.display import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from replaydb import Buffer, Store

T = TypeVar("T")

_HELP = "URL of the store: sqlite:///FILE or postgresql://USER:PASSWORD@HOST/DATABASE."

Url = Annotated[str, typer.Option(envvar="REPLAYDB_URL", help=_HELP, show_default=False)]
OptionalUrl = Annotated[
    str | None, typer.Option(envvar="REPLAYDB_URL", help=_HELP, show_default=False)
]


def _buffer_names(context: typer.Context, incomplete: str) -> list[str]:
    """Return matching buffers of the store on the command line; none if it cannot be read."""
    try:
        names = with_store(context.params["url"], lambda store: store.buffer_names())
    except Exception:
        return []
    return [name for name in names if name.startswith(incomplete) and name == printable(name)]


BufferName = Annotated[
    str, typer.Argument(help="Name of the buffer.", autocompletion=_buffer_names)
]


def finite(value: float | None) -> float | None:
    """Refuse NaN and infinite numbers, which minimums of options let pass."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number.")
    return value


Tokenizer = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH", help="Decode tokens with this Hugging Face tokenizer (file or folder)."
    ),
]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, with numbers in full precision.")]

#: Width of the output, in characters, if it is not a terminal.
_WIDE = 10_000

#: Minimum width, in characters, of a column that is truncated in a narrow terminal.
_CUT = 12


def with_store(url: str, work: Callable[[Store], Awaitable[T]], *, write: bool = False) -> T:
    """Open a store and return the result of a coroutine function.

    The store must exist, with the tables of this version.

    Args:
        url: The store.
        work: Called with the open store.
        write: Whether to open the store for writing; by default it is opened read-only.
    """

    async def opened() -> T:
        from replaydb import Store

        how: dict[str, Any] = {"migrate": False} if write else {"read_only": True}
        async with Store.open(url, **how) as store:
            return await work(store)

    return asyncio.run(opened())


def with_buffer(
    url: str, name: str, work: Callable[[Buffer], Awaitable[T]], *, write: bool = False
) -> T:
    """Open a buffer, which must exist, and return the result of `work`; see `with_store`."""

    async def found(store: Store) -> T:
        return await work(await store.buffer(name, create=False))

    return with_store(url, found, write=write)


def print_table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table to stdout; in a file or a pipe, all values are complete."""
    console().print(table_of(headings, rows))


def print_list(
    headings: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    spare: Sequence[str],
    cut: Sequence[str],
) -> None:
    """Print a table to stdout, with one line for each row even in a narrow terminal.

    Args:
        headings: Headings of the columns.
        rows: Values of each row.
        spare: Columns to omit if the terminal is too narrow, in this order.
        cut: Columns whose values may then be truncated with an ellipsis.
    """
    from rich.text import Text

    where = console()
    left_out = _left_out(headings, rows, spare, cut, where.width) if where.is_terminal else []
    kept = [i for i, heading in enumerate(headings) if heading not in left_out]
    table = table_of([headings[i] for i in kept], [[row[i] for i in kept] for row in rows])
    if where.is_terminal:
        for i, column in zip(kept, table.columns, strict=True):
            column.overflow = "ellipsis"
            column.no_wrap = headings[i] not in cut
            for cell in column.cells:
                if isinstance(cell, Text):
                    cell.no_wrap, cell.overflow = True, "ellipsis"
    where.print(table)
    if left_out:
        typer.echo(f"columns that do not fit: {', '.join(left_out)}; --json prints all")


def table_of(
    headings: Sequence[str], rows: Iterable[Sequence[object]], caption: str | None = None
) -> Table:
    """Return a table of values; columns of numbers are right-aligned."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    listed = list(rows)
    table = Table(box=box.SIMPLE, caption=caption, caption_justify="left")
    # `Text`, so that rich interprets no markup in names.
    for index, heading in enumerate(headings):
        numeric = all(isinstance(row[index], int | float | None) for row in listed)
        table.add_column(
            Text(printable(heading)), justify="right" if numeric else "left", overflow="fold"
        )
    for row in listed:
        table.add_row(*(Text(shown(value)) for value in row))
    return table


def print_fields(fields: Mapping[str, object]) -> None:
    """Print names and values to stdout, one pair for each line."""
    width = max(map(len, fields))
    for name, value in fields.items():
        text = printable(json.dumps(value)) if isinstance(value, dict | list) else shown(value)
        typer.echo(f"{printable(name):<{width}}  {text}".rstrip())


def print_text(text: str) -> None:
    """Print untrusted text to stdout, indented so that no line looks like output of a command."""
    for line in text.split("\n"):
        typer.echo(f"  {printable(line)}")


def print_more(last: int) -> None:
    """Print how to list the next page, which begins after the id `last`."""
    typer.echo(f"more rows: --after {last}")


def print_json(value: object) -> None:
    """Print a value as JSON to stdout; it may have dataclasses, times and non-finite numbers."""
    # ASCII only: JSON escapes all other characters, and with them terminal control sequences.
    text = json.dumps(_as_json(value), indent=2, allow_nan=False)
    typer.echo(text.replace("\x7f", "\\u007f"))


def shown(value: object) -> str:
    """Return a value as text: times to the second, floats with four significant digits."""
    if value is None:
        return "-"
    if isinstance(value, datetime):
        return f"{value:%Y-%m-%d %H:%M:%S}"
    return f"{value:.4g}" if isinstance(value, float) else printable(str(value))


def console(*, stderr: bool = False) -> Console:
    """Return the rich console of stdout or stderr."""
    from rich.console import Console

    made = Console(stderr=stderr, highlight=False)
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made.width = _WIDE
    return made


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int | None], object]]:
    """Show a progress bar on stderr while the block runs, if stderr is a terminal.

    The block gets a function `update(done, total)`; the total is None if it is unknown. `what` is
    shown beside the bar.
    """
    from rich import progress as bars

    where = console(stderr=True)
    with bars.Progress(
        bars.TextColumn("{task.description}", markup=False),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        bars.TimeRemainingColumn(),
        console=where,
        transient=True,
        disable=not where.is_terminal,
    ) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


class ErrorsInOneLine(TyperGroup):
    """Prints errors of replaydb and the system in one line on stderr, and exits with 1."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        from replaydb.errors import ReplayDBError

        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")  # terminals may lack characters
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()  # here, so that a failed write is reported below
            return result
        except BrokenPipeError:
            raise  # the reader of the pipe has closed it
        except (ReplayDBError, OSError) as error:
            # Not wrapped: a command in it can be pasted.
            console(stderr=True).print(
                printable(" ".join(f"error: {error}".splitlines())),
                style="red",
                markup=False,
                emoji=False,
                soft_wrap=True,
            )
            raise typer.Exit(1) from None


def _as_json(value: object) -> object:
    """Convert a value for JSON; non-finite numbers become "NaN", "Infinity" and "-Infinity"."""
    if is_dataclass(value) and not isinstance(value, type):
        return {one.name: _as_json(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, Mapping):
        return {name: _as_json(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(one) for one in value]
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _left_out(
    headings: Sequence[str],
    rows: Sequence[Sequence[object]],
    spare: Sequence[str],
    cut: Sequence[str],
    width: int,
) -> list[str]:
    """Return the columns to omit so that the others fit."""
    from rich.cells import cell_len

    widths = {
        heading: max([cell_len(heading), *(cell_len(shown(row[i])) for row in rows)])
        for i, heading in enumerate(headings)
    }
    widths |= {heading: min(widths[heading], _CUT) for heading in cut}
    left_out: list[str] = []
    for heading in spare:
        # Around each column are two spaces and a rule.
        if sum(widths.values()) + 3 * len(widths) + 1 <= width:
            break
        del widths[heading]
        left_out.append(heading)
    return left_out
