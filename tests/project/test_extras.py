"""Without an extra, code that needs it raises an error with its name, and all other code works.

All commands are called and all modules imported in processes in which packages outside of an extra
are hidden.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import replaydb as rdb
from replaydb.util.extras import MODULES
from support.groups import group, groups

CHECKOUT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
#: Extras for users; the others are for the development of replaydb.
USED = sorted(EXTRAS.keys() - {"bench", "dev", "docs"})
BARE = "none"
#: Commands that fail for another reason: the store has no packs, and SQLite has no roles.
REFUSED = {"db adopt-payloads", "db relocate", "db roles", "prune"}
#: Commands that need a package which no extra installs.
ELSEWHERE = {"import-dataset": "pip install datasets"}


@cache
def owners_of_modules() -> Mapping[str, list[str]]:
    """Return the packages of every importable module. Cached, as it takes a second."""
    return packages_distributions()


@cache
def modules_of(extra: str) -> frozenset[str]:
    """Return the modules that `pip install 'replaydb[EXTRA]'` installs."""
    wanted = [*PROJECT["dependencies"], *EXTRAS.get(extra, ())]
    found: set[tuple[str, str]] = set()
    waiting = [(Requirement(one), "") for one in wanted]
    while waiting:
        one, of = waiting.pop()
        if one.marker is not None and not one.marker.evaluate({"extra": of}):
            continue
        for its_extra in ["", *one.extras]:
            name = canonicalize_name(one.name)
            if (name, its_extra) not in found:
                found.add((name, its_extra))
                with suppress(PackageNotFoundError):  # a package for another platform
                    waiting += [(Requirement(each), its_extra) for each in requires(name) or ()]
    names = {name for name, _ in found}
    return frozenset(
        module
        for module, owners in owners_of_modules().items()
        if names & {canonicalize_name(owner) for owner in owners}
    )


def hidden_without(extra: str) -> list[str]:
    """Return the modules in this environment that the extra does not install."""
    kept = modules_of(extra) | {"replaydb", "support", "typing_extensions"}
    return sorted(
        name
        for name in owners_of_modules().keys() - kept
        if name.isidentifier() and not name.startswith("_")
    )


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Results of commands and imports, by the only extra; "dev" has everything."""
    start = tmp_path_factory.mktemp("store")
    url = f"sqlite:///{start / 'store.db'}"

    async def fill() -> None:
        async with rdb.Store.open(url, run="test") as store:
            buffer = await store.buffer("math")
            await buffer.put(groups(3))
            await buffer.lease(1, ttl=3600)
        async with rdb.Store.open(url, run="other") as store:
            await (await store.buffer("math")).put(group())

    asyncio.run(fill())
    shutil.copy(start / "store.db", start / "backup.db")
    row = {"group_uid": "a", "task_name": "math", "token_ids": [1, 2], "loss_mask": [0, 1],
           "buffer_name": "new", "reward": 1.0}  # fmt: skip
    (start / "rows.jsonl").write_text(json.dumps(row))
    (start / "dataset.jsonl").write_text(json.dumps({"prompt_ids": [1], "completion_ids": [2]}))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "COLUMNS": "1000"}

    def found(names: str, *extras: str) -> dict[str, dict[str, Any]]:
        processes = {}
        for extra in extras:
            folder = start.parent / f"with-{extra}"
            shutil.copytree(start, folder)
            hidden = [] if extra == "dev" else hidden_without(extra)
            processes[extra] = subprocess.Popen(
                [sys.executable, "-m", "support.extras", url, str(folder), names, *hidden],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
            )  # fmt: skip
        outputs = {extra: process.communicate() for extra, process in processes.items()}
        for extra, process in processes.items():
            assert process.returncode == 0, f"with {extra}: {outputs[extra][1]}"
        return {extra: json.loads(out.splitlines()[-1]) for extra, (out, _) in outputs.items()}

    both = found("all", BARE, "dev")
    # Commands that work without any extra also work with one, so only the others are run again.
    refused = [name for name, (_, line) in both[BARE]["commands"].items() if named(line)]
    half = len(USED) // 2
    return both | found(",".join(refused), *USED[:half]) | found(",".join(refused), *USED[half:])


def named(text: str | None) -> str | None:
    """Return the extra in the message of an error, or None."""
    match = re.search(r"pip install 'replaydb\[(\w+)\]'", text or "")
    return match[1] if match else None


@pytest.mark.parametrize("extra", [BARE, *USED])
def test_every_command_works_or_names_its_extra(
    outcomes: dict[str, dict[str, Any]], extra: str
) -> None:
    everything = outcomes["dev"]["commands"]
    assert {name for name, (status, _) in everything.items() if status} == REFUSED | set(ELSEWHERE)
    for name, (status, line) in outcomes[extra]["commands"].items():
        if name in ELSEWHERE:
            assert ELSEWHERE[name] in line
        elif status != everything[name][0] or named(line) is not None:
            wanted = named(line)
            assert wanted not in (None, extra), f"{name} with {extra}: {line}"
            assert outcomes[wanted]["commands"][name][0] == everything[name][0] == 0, (name, line)


@pytest.mark.parametrize("extra", [BARE, *USED])
def test_every_module_is_imported_or_names_its_extra(
    outcomes: dict[str, dict[str, Any]], extra: str
) -> None:
    assert set(outcomes["dev"]["modules"].values()) == {None}
    for name, error in outcomes[extra]["modules"].items():
        if error is not None:
            assert named(error) not in (None, extra), f"{name} with {extra}: {error}"


def test_commands_and_modules_that_need_an_extra(outcomes: dict[str, dict[str, Any]]) -> None:
    """Packages are really hidden in the processes."""
    bare = {name: named(line) for name, (_, line) in outcomes[BARE]["commands"].items()}
    assert {name: extra for name, extra in bare.items() if extra is not None} == {
        "export": "analysis",
        "import": "analysis",
        "metrics serve": "prometheus",
        "report": "report",
        "ui": "ui",
    }
    refused = outcomes[BARE]["modules"]
    for name in ("analysis", "exchange", "ui", "training.prometheus"):
        assert named(refused[f"replaydb.{name}"]) is not None
    assert outcomes["analysis"]["modules"]["replaydb.exchange"] is None


def test_modules_of_extras_are_those_that_they_install() -> None:
    assert MODULES.keys() == set(USED) - {"opentelemetry"}
    for extra, modules in MODULES.items():
        own = {module for one in EXTRAS[extra] for module in modules_of_package(one)}
        assert set(modules) <= own
        assert len(modules) == len(EXTRAS[extra])


def modules_of_package(requirement: str) -> set[str]:
    name = canonicalize_name(Requirement(requirement).name)
    return {
        module
        for module, owners in owners_of_modules().items()
        if name in map(canonicalize_name, owners)
    }
