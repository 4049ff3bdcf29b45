"""The command `alembic` in a checkout, for writing migrations."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from replaydb.database import migrations
from replaydb.database.tables.schema import REVISIONS
from support.engines import postgresql_nightly
from support.revisions import CHECKOUT


def alembic(
    *arguments: str, url: str | None = None, ini: Path | None = None
) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "REPLAYDB_URL"}
    if url is not None:
        environment["REPLAYDB_URL"] = url
    return subprocess.run(
        [sys.executable, "-m", "alembic", "-c", str(ini or CHECKOUT / "alembic.ini"), *arguments],
        cwd=CHECKOUT,
        env=environment,
        capture_output=True,
        text=True,
    )


@postgresql_nightly
async def test_upgrade_check_and_downgrade(empty_url: str) -> None:
    up = alembic("upgrade", "head", url=empty_url)
    assert up.returncode == 0, up.stderr
    assert "Running upgrade  -> 0001" in up.stderr
    assert await migrations.check(empty_url) == ()
    assert "No new upgrade operations" in alembic("check", url=empty_url).stdout
    assert alembic("downgrade", "base", url=empty_url).returncode == 0
    assert await migrations.current(empty_url) is None


async def test_the_x_argument_overrides_the_environment(
    empty_sqlite_url: str, tmp_path: Path
) -> None:
    other = tmp_path / "other.db"
    alembic("-x", f"url={empty_sqlite_url}", "upgrade", "head", url=f"sqlite:///{other}")
    assert await migrations.current(empty_sqlite_url) == REVISIONS[-1]
    assert other.name not in os.listdir(tmp_path)


async def test_the_ini_file_is_used_if_nothing_else_names_the_database(
    empty_sqlite_url: str, tmp_path: Path
) -> None:
    ini = tmp_path / "alembic.ini"
    lines = (CHECKOUT / "alembic.ini").read_text().replace("%(here)s", str(CHECKOUT))
    ini.write_text(lines.replace("sqlalchemy.url =", f"sqlalchemy.url = {empty_sqlite_url}"))
    up = alembic("upgrade", "head", ini=ini)
    assert up.returncode == 0, up.stderr
    assert await migrations.current(empty_sqlite_url) == REVISIONS[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("upgrade", "head"), "no database URL"),
        (("upgrade", "head", "--sql"), "--sql is not supported"),
    ],
)
def test_invalid_calls_show_an_error(arguments: tuple[str, ...], message: str) -> None:
    outcome = alembic(*arguments)
    assert outcome.returncode != 0
    assert message in outcome.stderr + outcome.stdout


async def test_calls_from_code_print_nothing(
    empty_url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    await migrations.upgrade(empty_url)
    assert capfd.readouterr() == ("", "")
