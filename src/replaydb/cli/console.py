"""What all commands share: the option that names the database, and how errors are shown."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

_HELP = "sqlite:///FILE or postgresql://USER:PASSWORD@HOST/DATABASE"

Url = Annotated[str, typer.Option(envvar="REPLAYDB_URL", help=_HELP, show_default=False)]
OptionalUrl = Annotated[
    str | None, typer.Option(envvar="REPLAYDB_URL", help=_HELP, show_default=False)
]


def printable(text: str) -> str:
    """Text of others as it can be shown: what would move the cursor or turn the text is escaped."""
    return "".join(
        sign if sign.isprintable() else sign.encode("unicode_escape").decode("ascii")
        for sign in text
    )


class ErrorsInOneLine(TyperGroup):
    """Shows an error of replaydb in one red line on stderr, and exits with 1."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        from replaydb.errors import ReplayDBError

        try:
            return super().invoke(ctx)
        except ReplayDBError as error:
            from rich.console import Console

            # One line however long: a command in it can be pasted.
            Console(stderr=True, soft_wrap=True).print(
                printable(" ".join(f"error: {error}".splitlines())),
                style="red",
                markup=False,
                highlight=False,
                emoji=False,
            )
            raise typer.Exit(1) from None
