"""The wheel, built from the sdist, works in a separate environment and outside of the checkout."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from replaydb.database.tables.schema import REVISIONS
from support.engines import postgresql_nightly

CHECKOUT = Path(__file__).resolve().parents[2]
ANYWHERE = "/"
NO_PATHS = {"PATH": "/usr/bin:/bin"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, CHECKOUT],
        check=True,
        capture_output=True,
    )
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel. Its dependencies are those of the tests' environment."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    subprocess.run(
        [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check",
         "--python", python, "install", "--no-deps", "--no-index", wheel],
        check=True,
        capture_output=True,
    )  # fmt: skip
    (site_packages,) = folder.glob("lib/python*/site-packages")
    # Paths in a .pth file are searched last, and .pth files in these folders, such as that of an
    # editable install, are ignored.
    (site_packages / "borrowed.pth").write_text(sysconfig.get_path("purelib"))
    return folder


def _run(environment: Path, *command: str) -> str:
    outcome = subprocess.run(
        [environment / "bin" / command[0], *command[1:]],
        cwd=ANYWHERE,
        env=NO_PATHS,
        capture_output=True,
        text=True,
    )
    assert outcome.returncode == 0, outcome.stderr
    return outcome.stdout


def test_contents_of_the_wheel(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {
        "replaydb/__init__.py",
        "replaydb/py.typed",
        "replaydb/migrations/env.py",
        "replaydb/migrations/script.py.mako",
        "replaydb/migrations/versions/0001_initial.py",
        "replaydb/migrations/versions/0002_idle_indexes.py",
    } <= names
    assert [name for name in names if "__pycache__" in name or name.endswith(".pyc")] == []
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"replaydb"}


def test_the_wheel_is_imported(environment: Path) -> None:
    path = _run(environment, "python", "-c", "import replaydb; print(replaydb.__file__)").strip()
    assert Path(path).is_relative_to(environment)


def test_the_version_of_the_command(environment: Path) -> None:
    code = "import importlib.metadata as m, replaydb; print(m.version('replaydb'))"
    assert _run(environment, "python", "-c", code) == _run(environment, "replaydb", "--version")


def test_a_program_uses_the_wheel(environment: Path, tmp_path: Path) -> None:
    """`make consumer` also checks its types, with mypy and pyright."""
    program = CHECKOUT / "tests" / "consumer" / "program.py"
    _run(environment, "python", "-P", str(program), f"sqlite:///{tmp_path}/store.db")


@postgresql_nightly
def test_the_wheel_migrates_a_database(environment: Path, empty_url: str) -> None:
    database = ("--url", empty_url)
    upgraded = _run(environment, "replaydb", "db", "upgrade", *database)
    assert upgraded == f"revision {REVISIONS[-1]}\n"
    assert _run(environment, "replaydb", "db", "check", *database) == "no differences\n"
