"""`python -m replaydb.cli`."""

from replaydb.cli import app

app()
