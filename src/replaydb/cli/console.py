"""What all commands share: options, stores that they open, tables, JSON, progress, errors."""

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
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from typer.core import TyperGroup

from replaydb.display import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from replaydb import Buffer, Store

T = TypeVar("T")

_HELP = "sqlite:///FILE or postgresql://USER:PASSWORD@HOST/DATABASE"

Url = Annotated[str, typer.Option(envvar="REPLAYDB_URL", help=_HELP, show_default=False)]
OptionalUrl = Annotated[
    str | None, typer.Option(envvar="REPLAYDB_URL", help=_HELP, show_default=False)
]


def _buffer_names(context: typer.Context, incomplete: str) -> list[str]:
    """Of the store that the command line names so far; none where it cannot be asked."""
    try:
        names = with_store(context.params["url"], lambda store: store.buffer_names())
    except Exception:
        return []
    return [name for name in names if name.startswith(incomplete) and name == printable(name)]


BufferName = Annotated[
    str, typer.Argument(help="Name of the buffer.", autocompletion=_buffer_names)
]
Json = Annotated[bool, typer.Option("--json", help="For scripts: JSON, in full precision.")]

#: Columns of a table that nobody looks at but a pipe.
_WIDE = 10_000

#: Columns that are left of a text at least, where a terminal is narrow.
_CUT = 12


def with_store(url: str, work: Callable[[Store], Awaitable[T]], *, write: bool = False) -> T:
    """What a coroutine function makes of a store, which must be there and up to date.

    Args:
        url: Where it is.
        work: Called with the open store.
        write: Whether it may write.
    """

    async def opened() -> T:
        from replaydb import Store
        from replaydb.database import migrations

        if write:
            await migrations.current(url)  # says that a file is not there, instead of making it
        how: dict[str, Any] = {"migrate": False} if write else {"read_only": True}
        async with Store.open(url, **how) as store:
            return await work(store)

    return asyncio.run(opened())


def with_buffer(
    url: str, name: str, work: Callable[[Buffer], Awaitable[T]], *, write: bool = False
) -> T:
    """What a coroutine function makes of a buffer, which must be there; see `with_store`."""

    async def found(store: Store) -> T:
        return await work(await store.buffer(name, create=False))

    return with_store(url, found, write=write)


def print_table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A table on stdout, whole where it goes into a file or a pipe."""
    console().print(table_of(headings, rows))


def print_list(
    headings: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    spare: Sequence[str],
    cut: Sequence[str],
) -> None:
    """A table on stdout with a line for each row, also in a narrow terminal.

    Args:
        headings: Of the columns.
        rows: Values of each row.
        spare: Columns that a terminal too narrow for all goes without, the first first.
        cut: Columns whose values may end in an ellipsis there; all others are whole.
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
        typer.echo(f"too narrow for {', '.join(left_out)}: --json has all")


def table_of(
    headings: Sequence[str], rows: Iterable[Sequence[object]], caption: str | None = None
) -> Table:
    """A table of values; numbers are to the right."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    listed = list(rows)
    table = Table(box=box.SIMPLE, caption=caption, caption_justify="left")
    # Names are shown as they are, also where they look like markup of rich.
    for index, heading in enumerate(headings):
        numeric = all(isinstance(row[index], int | float | None) for row in listed)
        table.add_column(
            Text(printable(heading)), justify="right" if numeric else "left", overflow="fold"
        )
    for row in listed:
        table.add_row(*(Text(shown(value)) for value in row))
    return table


def print_fields(fields: Mapping[str, object]) -> None:
    """Names and values on stdout, a line each."""
    width = max(map(len, fields))
    for name, value in fields.items():
        said = printable(json.dumps(value)) if isinstance(value, dict | list) else shown(value)
        typer.echo(f"{printable(name):<{width}}  {said}".rstrip())


def print_text(text: str) -> None:
    """A text of others on stdout, set in so that no line of it looks like one of ours."""
    for line in text.split("\n"):
        typer.echo(f"  {printable(line)}")


def print_more(last: int) -> None:
    """That there is another page after what a list has shown."""
    typer.echo(f"there are more: --after {last}")


def print_json(value: object) -> None:
    """JSON on stdout, of dataclasses, times, and numbers that are not finite too."""
    # ASCII: JSON escapes all that is not, and with it what a terminal would obey.
    text = json.dumps(_as_json(value), indent=2, allow_nan=False)
    typer.echo(text.replace("\x7f", "\\u007f"))


def shown(value: object) -> str:
    """A value as people read it: times to the second, numbers in four digits."""
    if value is None:
        return "-"
    if isinstance(value, datetime):
        return f"{value:%Y-%m-%d %H:%M:%S}"
    return f"{value:.4g}" if isinstance(value, float) else printable(str(value))


def console(*, stderr: bool = False) -> Console:
    """Where things are printed."""
    from rich.console import Console

    made = Console(stderr=stderr, highlight=False)
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made.width = _WIDE
    return made


@contextmanager
def progress(what: str, *, in_bytes: bool = False) -> Iterator[Callable[[int, int | None], object]]:
    """A progress bar on stderr, gone when it is done; none where that is no terminal.

    The block is given a function that is told how much is done, and how much there is, or None
    where nobody knows.

    Args:
        what: What is being done.
        in_bytes: Whether these numbers are bytes.
    """
    from rich import progress as bars

    count = bars.DownloadColumn() if in_bytes else bars.MofNCompleteColumn()
    where = console(stderr=True)
    with bars.Progress(
        bars.TextColumn("{task.description}", markup=False),
        bars.BarColumn(),
        count,
        bars.TimeRemainingColumn(),
        console=where,
        transient=True,
        disable=not where.is_terminal,
    ) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


class ErrorsInOneLine(TyperGroup):
    """Shows an error of replaydb or of the system in one red line on stderr, and exits with 1."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        from replaydb.errors import ReplayDBError

        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")  # not every terminal has all signs
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()  # here, where it is told
            return result
        except BrokenPipeError:
            raise  # whoever reads has seen enough
        except (ReplayDBError, OSError) as error:
            # One line however long: a command in it can be pasted.
            console(stderr=True).print(
                printable(" ".join(f"error: {error}".splitlines())),
                style="red",
                markup=False,
                emoji=False,
                soft_wrap=True,
            )
            raise typer.Exit(1) from None


def _as_json(value: object) -> object:
    """What JSON can say: "NaN", "Infinity" and "-Infinity" are strings."""
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
    """Columns to go without, so that the others fit."""
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
