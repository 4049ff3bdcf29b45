"""Temporary schema revisions, which simulate a later release."""

from __future__ import annotations

import shutil
from pathlib import Path
from textwrap import dedent, indent

import pytest

from replaydb.database import migrations
from replaydb.database.runtime import revisions
from replaydb.database.tables.schema import REVISIONS

CHECKOUT = Path(__file__).resolve().parents[2]
#: The revision after the newest.
NEXT = f"{int(REVISIONS[-1]) + 1:04}"

_REVISION = '''\
"""A revision of the tests."""

import sqlalchemy as sa
from alembic import op

revision = "{revision}"
down_revision = "{newest}"


def upgrade() -> None:
{upgrade}


def downgrade() -> None:
{downgrade}
'''


def release_next(
    folder: Path, monkeypatch: pytest.MonkeyPatch, upgrade: str, downgrade: str = "pass"
) -> None:
    """Add a revision with these function bodies to this process."""
    copy = shutil.copytree(CHECKOUT / "migrations", folder / "migrations")
    bodies = {"upgrade": upgrade, "downgrade": downgrade}
    (copy / "versions" / f"{NEXT}_next.py").write_text(
        _REVISION.format(
            revision=NEXT,
            newest=REVISIONS[-1],
            **{name: indent(dedent(body), "    ") for name, body in bodies.items()},
        )
    )
    monkeypatch.setattr(migrations, "_folder", lambda: copy)
    monkeypatch.setattr(revisions, "REVISIONS", (*REVISIONS, NEXT))
