"""The documentation is complete, its links work, and its examples run."""

from __future__ import annotations

import ast
import builtins
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any
from urllib.parse import unquote

import duckdb
import pytest

import replaydb as rdb
from pictures import PICTURES, VIEWS
from replaydb import analysis
from replaydb.database.tables.views import VIEWS as VIEWS_OF_STORE
from support.browsing import MISSING
from support.connections import transaction
from support.engines import postgresql_nightly

CHECKOUT = Path(__file__).resolve().parents[2]
GUIDES = [CHECKOUT / "README.md", *sorted((CHECKOUT / "docs").rglob("*.md"))]
ARCHITECTURE = CHECKOUT / "docs" / "architecture.md"
SECURITY = CHECKOUT / "SECURITY.md"
PAGES = [*GUIDES, SECURITY, CHECKOUT / "CHANGELOG.md", CHECKOUT / "CONTRIBUTING.md"]

_FENCE = re.compile(r"^```(?P<info>[^\n]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
_CODE_SPAN = re.compile(r"`([^`\n]+)`")
_IMAGE = re.compile(r"!\[([^\]]*)\]\(([^)\s]+)\)")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)
_TEST = re.compile(r"\b(tests/[\w/]+\.py)(?:::(\w+))?")


@dataclass(frozen=True)
class Block:
    """A fenced code block with its position."""

    page: Path
    line: int
    info: str
    body: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(CHECKOUT)}:{self.line}"

    @property
    def runs(self) -> bool:
        return self.info == "python run"

    def compiled(self) -> CodeType:
        """Compile the code, with top-level `await` allowed."""
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        code: CodeType = compile("\n" * self.line + self.body, self.page, "exec", flags)
        return code


def blocks_of(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf8")
    for match in _FENCE.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        yield Block(page, line, match["info"].strip(), match["body"])


BLOCKS = [block for page in GUIDES for block in blocks_of(page)]
PYTHON = [block for block in BLOCKS if block.info.split(" ")[0] == "python"]
README, *OTHERS = GUIDES
RUNNING_PAGES = sorted({block.page for block in PYTHON if block.runs and block.page in OTHERS})
QUERIES = [block for block in blocks_of(CHECKOUT / "docs" / "analysis.md") if block.info == "sql"]


def prose_of(page: Path) -> str:
    return _FENCE.sub("", page.read_text(encoding="utf8"))


def anchors_of(page: Path) -> set[str]:
    """Return the anchors of headings: lower case, no punctuation, dashes for spaces."""
    headings = _HEADING.findall(prose_of(page))
    return {re.sub(r"[^\w\- ]", "", one.lower()).strip().replace(" ", "-") for one in headings}


def documented_code() -> str:
    """Return all code spans and code blocks of the guides."""
    spans = [span for page in GUIDES for span in _CODE_SPAN.findall(prose_of(page))]
    return "\n".join([*spans, *(block.body for block in BLOCKS)])


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_python_compiles(block: Block) -> None:
    assert block.info in {"python", "python run"}
    block.compiled()


def test_the_readme_runs(tmp_path: Path) -> None:
    (block,) = (block for block in PYTHON if block.page == README and block.runs)
    (tmp_path / "example.py").write_text(block.body, encoding="utf8")
    outcome = subprocess.run(
        [sys.executable, "-W", "error", "example.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(rdb.__file__).parents[1])},
        capture_output=True,
        text=True,
    )
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.stderr == ""
    assert (tmp_path / "grpo.db").exists()


@postgresql_nightly
@pytest.mark.parametrize("page", RUNNING_PAGES, ids=lambda page: page.stem)
async def test_a_page_runs(page: Path, url: str) -> None:
    async with rdb.Store.open(url, run="docs") as store:
        buffer = await store.buffer("docs")
        names: dict[str, Any] = {"rdb": rdb, "store": store, "buffer": buffer, "url": url}
        names["__builtins__"] = builtins  # some functions look it up in their caller
        for block in PYTHON:
            if block.page == page and block.runs:
                outcome = FunctionType(block.compiled(), names)()
                if inspect.isawaitable(outcome):
                    await outcome


def completion(reward: float, text: str, version: int = 0) -> rdb.Episode:
    return rdb.Episode(
        prompt_ids=[1],
        response_ids=[2, 3],
        reward=reward,
        policy_version=version,
        finish_reason="stop",
        text=text,
    )


async def fill_store(url: str) -> None:
    """Create a small store for which every query of docs/analysis.md returns rows."""
    async with rdb.Store.open(url, run="qwen-7b-a") as store:
        buffer = await store.buffer("math", max_staleness=4)
        await buffer.put(
            rdb.EpisodeGroup(
                "gsm8k",
                [completion(reward, f"wait, {number}") for reward in (0.0, 1.0)],
                prompt_uid=f"gsm8k/{number}",
                tags={"level": "hard" if number % 2 else "easy"},
            )
            for number in range(6)
        )
        for step in range(3):
            drawn = await buffer.sample(2, rdb.Prioritized(), step=step)
            await buffer.update(drawn.ids, tags={"ratio_mean": 0.5 + step, "ratio_step": step})
            async with buffer.lease(1, rdb.Uniform(), ttl=60, step=step):
                pass
            await buffer.advance_policy(step + 1)
        lease = await buffer.lease(1, ttl=60, step=3)
        await lease.nack(reason="the worker died")
        easier = [completion(1.0, f"now {number}", 2) for number in range(2)]
        await buffer.put(rdb.EpisodeGroup("gsm8k", easier, prompt_uid="gsm8k/0"))
        await buffer.put(rdb.EpisodeGroup("gsm8k", [], status="failed"))
        await buffer.open_group("gsm8k", "pending", 4)
    async with rdb.Store.open(url, run="qwen-7b-b") as store:
        other = await store.buffer("math")
        await other.put(rdb.EpisodeGroup("gsm8k", [completion(0.5, "once more", 1)]))


def duckdb_over(url: str) -> duckdb.DuckDBPyConnection:
    """Open a DuckDB database with the rows of the views."""
    connection = duckdb.connect()
    for name, rows in {
        "group_overview": analysis.groups(url),
        "episodes": analysis.episodes(url),
        "training_history": analysis.draws(url),
        "prompt_overview": analysis.prompts(url),
        "policy_overview": analysis.policies(url),
    }.items():
        connection.register(name, rows)
    connection.execute("CREATE VIEW episode_overview AS SELECT * EXCLUDE text FROM episodes")
    connection.execute(
        "CREATE VIEW transcript AS"
        " SELECT group_id, position, text FROM episodes WHERE text IS NOT NULL"
    )
    return connection


def as_shown(value: Any) -> Any:
    """Normalize a value of any engine: numbers are rounded, times truncated to seconds."""
    if isinstance(value, Decimal | float | int):  # sums have different types
        return round(float(value), 9)
    if isinstance(value, datetime):
        return f"{value.astimezone(UTC):%Y-%m-%d %H:%M:%S}"
    if isinstance(value, str) and re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:", value):
        return value[:19]
    return value


async def test_queries_of_the_analysis_return_rows(url: str) -> None:
    """The engine and DuckDB return the same rows."""
    await fill_store(url)
    with duckdb_over(url) as connection:
        for query in QUERIES:
            async with transaction(url) as there:
                if there.dialect.name == "postgresql":
                    await there.exec_driver_sql("SET TIME ZONE 'UTC'")
                rows = (await there.exec_driver_sql(query.body)).all()
            assert rows, query
            found = connection.sql(query.body).to_arrow_table().to_pylist()
            # Sorted, as the engines order NULLs differently.
            assert sorted([repr([as_shown(one) for one in row.values()]) for row in found]) == (
                sorted([repr([as_shown(one) for one in row]) for row in rows])
            ), query


def test_the_analysis_has_queries() -> None:
    assert len(QUERIES) >= 20


def test_every_public_name_is_documented() -> None:
    words = set(re.findall(r"\w+", documented_code()))
    assert [name for name in rdb.__all__ if name not in words] == []


def test_every_status_is_documented() -> None:
    words = set(re.findall(r"\w+", documented_code()))
    assert [status.value for status in rdb.GroupStatus if status.value not in words] == []


def test_every_setting_is_in_the_table() -> None:
    text = (CHECKOUT / "docs" / "lifecycle.md").read_text(encoding="utf8")
    rows = dict(re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", text, re.MULTILINE))
    shown = rdb.BufferSettings()
    assert {name: ast.literal_eval(default) for name, default in rows.items()} == {
        field.name: getattr(shown, field.name) for field in fields(shown)
    }


def test_every_column_of_the_views_is_documented() -> None:
    text = prose_of(CHECKOUT / "docs" / "analysis.md")
    for view in VIEWS_OF_STORE:
        (row,) = re.findall(rf"^\| `{view.table.name}` \|.*$", text, re.MULTILINE)
        named = set(_CODE_SPAN.findall(row)) | {f"num_{status}" for status in rdb.GroupStatus}
        assert [column.name for column in view.table.columns if column.name not in named] == []


def test_the_number_of_views_is_documented() -> None:
    numbers = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    counts = re.compile(rf"\b({'|'.join(numbers)}|\d+)\s+views\b", re.IGNORECASE)
    found = {page: counts.findall(prose_of(page)) for page in [*GUIDES, SECURITY]}
    assert {README, SECURITY} <= {page for page in found if found[page]}
    words = {number.lower() for several in found.values() for number in several}
    assert words <= {numbers[len(VIEWS_OF_STORE) - 1], str(len(VIEWS_OF_STORE))}
    for page in (SECURITY, CHECKOUT / "docs" / "analysis.md"):
        text = prose_of(page)
        assert [it.table.name for it in VIEWS_OF_STORE if f"`{it.table.name}`" not in text] == []


def test_every_module_is_in_the_architecture() -> None:
    named = set(re.findall(r"[\w/]+", "\n".join(_CODE_SPAN.findall(prose_of(ARCHITECTURE)))))
    package = Path(rdb.__file__).parent
    modules: dict[str, str] = {}
    for folder, prefix in ((package, ""), (package / "database", "database/")):
        modules |= {path.stem: prefix for path in folder.glob("[!_]*.py")}
        modules |= {f"{path.parent.name}/": prefix for path in folder.glob("*/__init__.py")}
    del modules["database/"]  # its modules are listed instead
    assert len(modules) > 20
    assert [name for name in modules if not {name, modules[name] + name} & named] == []


def test_every_error_is_documented() -> None:
    text = prose_of(CHECKOUT / "docs" / "consistency.md")
    errors = [
        name
        for name in rdb.__all__
        if inspect.isclass(thing := getattr(rdb, name)) and issubclass(thing, rdb.ReplayDBError)
    ]
    assert [name for name in errors if f"`{name}`" not in text] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(CHECKOUT)))
def test_links_have_targets(page: Path) -> None:
    broken = []
    for link in _LINK.findall(prose_of(page)):
        path, _, anchor = unquote(link).partition("#")
        if re.match(r"[a-z]+:", path):
            continue
        target = (page.parent / path).resolve() if path else page
        there = target.is_relative_to(CHECKOUT) and target.exists()
        if not there or (anchor and anchor not in anchors_of(target)):
            broken.append(link)
    assert broken == []


def test_pictures_of_the_pages_are_shown_and_described() -> None:
    shown = [image for page in GUIDES for image in _IMAGE.findall(prose_of(page))]
    assert [path for words, path in shown if not words] == []
    taken = {f"{name}.png" for name in VIEWS}
    assert {Path(path).name for _, path in shown if "pictures/" in path} == taken
    assert {path.name for path in PICTURES.iterdir()} == taken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(CHECKOUT)))
def test_cited_tests_exist(page: Path) -> None:
    missing = []
    for path, name in _TEST.findall(page.read_text(encoding="utf8")):
        file = CHECKOUT / path
        if not file.exists() or (name and f"def {name}" not in file.read_text(encoding="utf8")):
            missing.append(f"{path}::{name}")
    assert missing == []


def test_cited_make_targets_exist() -> None:
    makefile = (CHECKOUT / "Makefile").read_text(encoding="utf8")
    targets = set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))
    text = "\n".join(page.read_text(encoding="utf8") for page in PAGES)
    named = set(re.findall(r"(?:^|`)make ([a-z]+)\b", text, re.MULTILINE))
    assert {"demo", "test"} <= named <= targets


def test_the_first_screen_of_the_readme_has_the_demo_and_the_tests() -> None:
    first = README.read_text(encoding="utf8").splitlines()[:40]
    for command in ("make demo", "make test"):
        assert [line for line in first if re.match(rf"{command} +# \w", line)], command


def test_the_installation_of_chromium_is_documented() -> None:
    text = (CHECKOUT / "CONTRIBUTING.md").read_text(encoding="utf8")
    for command in ("make apt", ".venv/bin/playwright install chromium"):
        assert command in MISSING
        assert f"`{command}`" in text


def test_no_page_contains_a_local_path() -> None:
    private = re.compile(r"(?<![\w.`/:])/(?:home|root|tmp|work|Users)/")
    assert [page.name for page in PAGES if private.search(page.read_text(encoding="utf8"))] == []
