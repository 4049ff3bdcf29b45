"""Rules for all integrations: documentation, versions, imports, and changes of stored groups."""

from __future__ import annotations

import ast
import pkgutil
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from replaydb import integrations

CHECKOUT = Path(__file__).resolve().parents[2]
#: Modules that several integrations use.
_SHARED = {"decoding", "values"}
NAMES = sorted({module.name for module in pkgutil.iter_modules(integrations.__path__)} - _SHARED)
#: Packages that only their own integration may import.
_FOREIGN = {
    "datasets",
    "ray",
    "skyrl",
    "tensordict",
    "torchtitan",
    "transfer_queue",
    "transformers",
}
_FOREIGN |= {"trl", "verl"}
_ROW = re.compile(r"^\| \[[^\]]+\]\(docs/integrations/(\w+)\.md\) \| ([^|]+) \|", re.MULTILINE)


def _imported(code: str) -> set[str]:
    listing = f"{code}; import sys; print(*sys.modules)"
    outcome = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", listing], check=True, capture_output=True, text=True
    )
    return set(outcome.stdout.split())


def test_the_package_imports_no_trainer() -> None:
    imported = _imported("import replaydb.integrations, replaydb.blocking, replaydb.training")
    assert "replaydb.integrations" in imported
    assert imported.isdisjoint(_FOREIGN)


@pytest.mark.parametrize("name", NAMES)
def test_each_integration_has_a_page(name: str) -> None:
    page = CHECKOUT / "docs" / "integrations" / f"{name}.md"
    assert f"replaydb.integrations.{name}" in page.read_text(encoding="utf8")


def test_updates_and_deletes_name_the_statuses_that_they_expect() -> None:
    """Another process can have changed the status since the integration read it."""
    [folder] = integrations.__path__
    found = 0
    for file in Path(folder).rglob("*.py"):
        nodes = [*ast.walk(ast.parse(file.read_text(encoding="utf8")))]
        limited = {
            part
            for node in nodes
            if isinstance(node, ast.Call) and any(each.arg == "statuses" for each in node.keywords)
            for part in (node.func, *node.args)
        }
        for node in nodes:
            if isinstance(node, ast.Attribute) and node.attr in ("update", "delete"):
                owner = ast.unparse(node.value)
                if owner.endswith("buffer"):
                    found += 1
                    assert node in limited, f"{file}:{node.lineno}: {owner}.{node.attr}"
    assert found >= 12


def test_the_readme_lists_the_tested_versions() -> None:
    rows = dict(_ROW.findall((CHECKOUT / "README.md").read_text(encoding="utf8")))
    assert sorted(rows) == NAMES
    for name, tested in rows.items():
        for package, shown in re.findall(r"`([\w-]+) (\d[\w.]*)`", tested):
            try:
                installed = version(package)
            except PackageNotFoundError:
                pytest.fail(f"{name}: {package} is not installed here")
            assert shown == installed, f"{name}: tested with {package} {installed}"
