"""Throw-away revisions: what a later release will bring, tried out on today's tables."""

from __future__ import annotations

import shutil
from pathlib import Path
from textwrap import dedent, indent

import pytest

from replaydb.database import migrate

CHECKOUT = Path(__file__).resolve().parents[2]

_REVISION = '''\
"""A revision of the tests."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
{upgrade}


def downgrade() -> None:
{downgrade}
'''


def release_0002(
    folder: Path, monkeypatch: pytest.MonkeyPatch, upgrade: str, downgrade: str = "pass"
) -> None:
    """From here on this process has a revision 0002, with these bodies."""
    copy = shutil.copytree(CHECKOUT / "migrations", folder / "migrations")
    bodies = {"upgrade": upgrade, "downgrade": downgrade}
    (copy / "versions" / "0002_next.py").write_text(
        _REVISION.format(**{name: indent(dedent(body), "    ") for name, body in bodies.items()})
    )
    monkeypatch.setattr(migrate, "_folder", lambda: copy)
    monkeypatch.setattr(migrate, "REVISIONS", ("0001", "0002"))
