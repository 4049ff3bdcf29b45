"""Workflows, and what else tells services how to build, publish and describe the project."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import moved
from lowest.__main__ import lowest_versions
from untagged import missing

CHECKOUT = Path(__file__).parents[2]
PROJECT = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
MAKEFILE = (CHECKOUT / "Makefile").read_text()
WORKFLOWS: dict[str, dict[str, Any]] = {
    path.stem: yaml.load(path.read_text(), yaml.BaseLoader)  # noqa: S506 - `on` is no boolean
    for path in sorted((CHECKOUT / ".github/workflows").glob("*.yml"))
}
STEPS = [
    step
    for workflow in WORKFLOWS.values()
    for job in workflow["jobs"].values()
    for step in job.get("steps", ())
]


@pytest.mark.parametrize(
    ("schema", "files"),
    [
        ("custom.github-workflows-require-timeout", ".github/workflows/*.yml"),
        ("vendor.citation-file-format", "CITATION.cff"),
        ("vendor.compose-spec", "docker-compose.yml"),
        ("vendor.dependabot", ".github/dependabot.yml"),
        ("vendor.github-issue-config", ".github/ISSUE_TEMPLATE/config.yml"),
        ("vendor.github-issue-forms", ".github/ISSUE_TEMPLATE/[!c]*.yml"),
        ("vendor.github-workflows", ".github/workflows/*.yml"),
    ],
)
def test_files_have_their_schema(schema: str, files: str) -> None:
    paths = list(CHECKOUT.glob(files))
    assert paths
    program = Path(sys.executable).with_name("check-jsonschema")
    options = ["--default-filetype", "yaml", "--builtin-schema", schema]
    outcome = subprocess.run([program, *options, *paths], capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stdout


def test_every_step_of_a_workflow_is_a_make_target() -> None:
    targets = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
    commands = [step["run"] for step in STEPS if "run" in step]
    assert len(commands) > 10
    # The service's own command; all else can be run, and fails, in a clone.
    others = [it for it in commands if not it.startswith("gh release create ")]
    assert len(others) == len(commands) - 1
    assert [it for it in others if not re.match(r"make [a-z-]+( [A-Z]+=\S+)?$", it)] == []
    assert {it.split(" ")[1] for it in others} <= targets


def test_workflows_run_what_must_be_checked() -> None:
    commands = {
        name: {
            step["run"].split(" ")[1]
            for job in workflow["jobs"].values()
            for step in job.get("steps", ())
            if step.get("run", "").startswith("make ")
        }
        for name, workflow in WORKFLOWS.items()
    }
    assert commands["tests"] >= {"check", "suite", "lowest", "newest", "integrations"}
    assert commands["nightly"] >= {"test-all", "torture", "fuzz", "trainers", "audit"}
    assert commands["docs"] == {"docs"}
    assert commands["release"] == {"release"}
    assert WORKFLOWS["release"]["jobs"]["publish"]["needs"] == ["tests", "build"]


def test_the_matrix_has_all_systems_and_versions() -> None:
    matrix = WORKFLOWS["tests"]["jobs"]["suite"]["strategy"]["matrix"]
    lowest = PROJECT["requires-python"].removeprefix(">=")
    assert matrix["python"][0] == lowest
    promised = [it.rpartition(" :: ")[2] for it in PROJECT["classifiers"] if "Python :: " in it]
    assert set(promised) <= set(matrix["python"])
    assert {it.partition("-")[0] for it in matrix["os"]} == {"ubuntu", "macos"}


def test_workflows_have_no_permissions_that_they_do_not_need() -> None:
    """Only the jobs that publish have more than to read the code."""
    read = {"contents": "read"}
    assert [name for name, it in WORKFLOWS.items() if it["permissions"] != read] == []
    more = {
        (name, job): list(it["permissions"])
        for name, workflow in WORKFLOWS.items()
        for job, it in workflow["jobs"].items()
        if "permissions" in it
    }
    assert more == {
        ("docs", "deploy"): ["pages", "id-token"],
        ("release", "publish"): ["id-token", "attestations"],
        ("release", "announce"): ["contents"],
    }
    checkouts = [step for step in STEPS if step.get("uses", "").startswith("actions/checkout@")]
    assert len(checkouts) > 5
    assert {step["with"]["persist-credentials"] for step in checkouts} == {"false"}


def make(target: str, version: str) -> subprocess.CompletedProcess[str]:
    """Run it as from a shell, not as a part of the `make` that runs the tests."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return subprocess.run(
        ["make", "--silent", target, f"VERSION={version}"],  # noqa: S607
        cwd=CHECKOUT,
        env=ours,
        capture_output=True,
        text=True,
    )


def test_notes_are_the_section_of_the_changelog() -> None:
    shown = make("notes", PROJECT["version"])
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.strip()
    assert shown.stdout in (CHECKOUT / "CHANGELOG.md").read_text()
    assert "\n## " not in shown.stdout
    assert len(shown.stdout.splitlines()) < 150
    assert make("notes", "99.0.0").returncode != 0


def test_nothing_is_released_without_a_dated_section_of_the_changelog() -> None:
    refused = make("release", "99.0.0")
    assert (refused.returncode, refused.stdout) == (2, "")


def test_what_is_missing_to_tag_is_named(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        who = ("-c", "user.name=test", "-c", "user.email=test@example.org")
        subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True)  # noqa: S607

    def write(name: str, text: str) -> None:
        (tmp_path / name).write_text(text)

    write("pyproject.toml", '[project]\nversion = "1.2.0"\n')
    write("CHANGELOG.md", "## [1.2.0] - Unreleased\n## [1.1.0] - 2026-01-02\n")
    write("CITATION.cff", "version: 1.2.0\n")
    git("init", "--quiet")
    assert missing(tmp_path) == [
        "CHANGELOG.md: the section [1.2.0] has no date",
        "CITATION.cff: no date-released",
        "pyproject.toml: no Documentation, Issues, Repository in [project.urls]",
        "git: 3 files have changes that are not committed",
    ]
    names = ("Documentation", "Issues", "Repository")
    urls = "".join(f"{name} = 'https://example.org'\n" for name in names)
    write("pyproject.toml", f'[project]\nversion = "1.2.0"\n[project.urls]\n{urls}')
    write("CHANGELOG.md", "## [1.2.0] - 2026-02-03\n")
    write("CITATION.cff", "version: 1.2.0\ndate-released: 2026-02-03\n")
    git("add", ".")
    git("commit", "--quiet", "--message", "release")
    assert missing(tmp_path) == []
    git("tag", "v1.2.0")
    assert missing(tmp_path) == ["git: the tag v1.2.0 exists already"]


def test_the_citation_has_the_version() -> None:
    citation = yaml.safe_load((CHECKOUT / "CITATION.cff").read_text())
    assert citation["version"] == PROJECT["version"]
    assert citation["license"] == PROJECT["license"]


def test_every_dependency_of_users_has_a_lower_bound() -> None:
    """`make lowest` installs exactly these."""
    pins = lowest_versions(borrowed=set())
    assert len(pins) > len(PROJECT["dependencies"])
    assert "torch==2.4" in pins


def test_moved_packages_are_listed() -> None:
    pins = "# names\nnumpy==2.4.6\nScikit_Learn==1.8\ntorch==2.13.0\ntrl==1.16.0\n"
    found = {"numpy": "2.5.0", "scikit-learn": "1.9", "torch": "2.13.0+cpu"}
    assert moved.moved(pins, found) == ["| numpy | 2.4.6 | 2.5.0 |", "| Scikit_Learn | 1.8 | 1.9 |"]
