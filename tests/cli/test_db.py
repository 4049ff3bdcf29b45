"""`replaydb db` from the command line."""

from __future__ import annotations

import asyncio
import shlex
import shutil
from pathlib import Path

import pytest
from sqlalchemy import make_url, text
from typer.testing import CliRunner, Result

import replaydb
from replaydb import Store
from replaydb.cli import app
from replaydb.database.tables.schema import REVISIONS
from support.connections import transaction
from support.engines import both_engines
from support.groups import group

NEWEST = REVISIONS[-1]
PASSWORD = "hunter2"  # noqa: S105


def run(*arguments: str, url: str | None = None, answer: str | None = None) -> Result:
    # Wide enough for all messages: a narrow terminal wraps them.
    return CliRunner().invoke(
        app, arguments, input=answer, env={"REPLAYDB_URL": url, "COLUMNS": "200"}
    )


def test_version() -> None:
    assert run("--version").output == f"{replaydb.__version__}\n"


@both_engines
def test_tables_are_upgraded_and_downgraded(empty_url: str) -> None:
    assert run("db", "upgrade", "--url", empty_url).output == f"revision {NEWEST}\n"
    assert run("db", "check", "--url", empty_url).output == "no differences\n"
    assert f"* {NEWEST}  " in run("db", "history", "--url", empty_url).output
    down = run("db", "downgrade", "base", "--yes", "--url", empty_url)
    assert down.output == "revision none\n"
    assert run("db", "current", "--url", empty_url).output == "none\n"


def test_the_url_can_come_from_the_environment(empty_sqlite_url: str) -> None:
    assert run("db", "upgrade", url=empty_sqlite_url).exit_code == 0
    assert run("db", "current", url=empty_sqlite_url).output == f"{NEWEST}\n"


def test_history_needs_no_database() -> None:
    assert run("db", "history").output.startswith("  0001  ")


def test_adopting_payloads_asks_for_confirmation(sqlite_url: str, tmp_path: Path) -> None:
    async def put(url: str) -> None:
        async with Store.open(url, payloads=(tmp_path / "payloads").as_uri()) as store:
            await (await store.buffer("math")).put(group())

    asyncio.run(put(sqlite_url))
    copy = f"sqlite:///{shutil.copy(tmp_path / 'replay.db', tmp_path / 'copy.db')}"
    assert "Aborted" in run("db", "adopt-payloads", url=copy, answer="n\n").output
    with pytest.raises(replaydb.PayloadsReadOnlyError):
        asyncio.run(put(copy))
    answered = run("db", "adopt-payloads", url=copy, answer="y\n").output
    assert "its puts are refused" in answered
    assert answered.endswith("this database owns its payloads\n")
    asyncio.run(put(copy))
    back = run("db", "adopt-payloads", "--yes", url=sqlite_url)
    assert back.output == "this database owns its payloads\n"
    asyncio.run(put(sqlite_url))


@pytest.mark.parametrize(("answer", "left"), [("n\n", f"{NEWEST}\n"), ("y\n", "none\n")])
def test_downgrade_asks_for_confirmation(sqlite_url: str, answer: str, left: str) -> None:
    run("db", "downgrade", "base", url=sqlite_url, answer=answer)
    assert run("db", "current", url=sqlite_url).output == left


@both_engines
def test_downgrade_shows_what_it_loses(own_url: str, tmp_path: Path) -> None:
    async def fill() -> None:
        payloads = (tmp_path / "payloads").as_uri()
        async with Store.open(own_url, payloads=payloads) as store:
            buffer = await store.buffer("math", capacity=replaydb.Capacity(groups=3))
            await buffer.put([group(f"{nth}") for nth in range(3)])
            await buffer.sample(3)
            await buffer.put(group("0"), on_duplicate="replace")
            await buffer.put(group("3"))
            await buffer.advance_policy(7)

    asyncio.run(fill())
    replaced = "1 drawn groups that were replaced since: what the draws took"
    assert run("db", "downgrade", "0010", url=own_url, answer="n\n").output.startswith("Downgrade")
    asked = run("db", "downgrade", "0009", url=own_url, answer="n\n").output
    assert asked.startswith(f"lost, also after a new upgrade:\n  {replaced}\n")
    assert "  1 evicted groups: that they were not consumed\nDowngrade to 0009" in asked
    asked = run("db", "downgrade", "0005", url=own_url, answer="n\n").output
    assert "  3 groups with payloads outside the database: their payloads, so they fail" in asked
    assert "  1 policy versions: when buffers advanced to them\n" in asked
    assert "outcomes" not in asked
    assert run("db", "current", url=own_url).output == f"{NEWEST}\n"
    done = run("db", "downgrade", "0005", "--yes", url=own_url).output
    assert done == asked.partition("Downgrade")[0] + "revision 0005\n"
    asked = run("db", "downgrade", "base", url=own_url, answer="n\n").output
    assert "  4 groups: all of their data\n" in asked
    assert "outside" not in asked
    assert replaced not in asked
    unknown = run("db", "downgrade", "9999", "--yes", url=own_url)
    assert unknown.exit_code == 1
    assert "one of `replaydb db history`" in unknown.stderr


def test_check_reports_differences(empty_url: str) -> None:
    run("db", "upgrade", url=empty_url)

    async def drop_an_index() -> None:
        async with transaction(empty_url) as connection:
            await connection.execute(text("DROP INDEX ix_draw_step"))

    asyncio.run(drop_an_index())
    outcome = run("db", "check", url=empty_url)
    assert (outcome.exit_code, outcome.stdout) == (1, "add index ix_draw_step\n")


@pytest.mark.parametrize(
    ("command", "url", "message"),
    [
        ("check", "sqlite:///none.db", "none.db: there is no such file"),
        ("upgrade", "nonsense && hunter2", "something that is not a URL"),
        ("upgrade", "mysql://me:hunter2@host/db", "engine 'mysql'"),
        ("upgrade", "postgresql://me:hunter2@localhost:1/db", "me:***@localhost"),
        ("current", "postgresql://me:hunter2@localhost:1/db", "me:***@localhost"),
    ],
)
def test_an_error_is_one_line_without_password(
    command: str, url: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = run("db", command, url=url)
    assert outcome.exit_code == 1
    assert outcome.stdout == ""
    assert outcome.stderr.startswith("error: ")
    assert message in outcome.stderr
    assert outcome.stderr.count("\n") == 1
    assert "hunter2" not in outcome.stderr


@pytest.mark.parametrize("name", ["a  b.db", "it's $(here) & `there`.db", "50%41;#.db", "数 \\.db"])
def test_the_command_of_an_error_can_be_pasted(name: str, tmp_path: Path) -> None:
    (tmp_path / name).touch()
    url = f"sqlite:///{tmp_path}/{name.replace('%', '%25')}"
    outcome = CliRunner().invoke(app, ["db", "check", "--url", url], env={"COLUMNS": "20"})
    message, _, command = outcome.stderr.partition("; run: ")
    assert message == "error: there are no tables yet"
    program, *arguments = shlex.split(command)
    assert program == "replaydb"
    assert run(*arguments).output == f"revision {NEWEST}\n"
    assert run("db", "current", "--url", url).output == f"{NEWEST}\n"


def test_a_password_is_replaced_by_its_variable(empty_postgresql_url: str) -> None:
    url = make_url(empty_postgresql_url).set(password=PASSWORD).render_as_string(False)
    outcome = run("db", "check", url=url)
    assert PASSWORD not in outcome.stderr
    command = outcome.stderr.partition("in REPLAYDB_URL, run: ")[2]
    program, *arguments = shlex.split(command)
    assert program == "replaydb"
    assert run(*arguments, url=url).output == f"revision {NEWEST}\n"


def test_the_error_without_a_url_names_the_option() -> None:
    outcome = run("db", "upgrade")
    assert outcome.exit_code == 2
    assert "--url" in outcome.stderr
    assert "REPLAYDB_URL" in outcome.stderr
