"""The table of test suites is up to date, and the sample of mutants is stable."""

from __future__ import annotations

from pathlib import Path

import pytest

from mutants.generate import sample, source_files
from mutants.suites import suite_of

CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _in_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(CHECKOUT)


def test_all_tests_in_suites_exist() -> None:
    named = {Path(option) for path in source_files() for option in suite_of(path).options}
    paths = {path for path in named if path.parts[:1] == ("tests",)}
    assert paths
    assert not [path for path in paths if not path.exists()]


def test_a_sample_is_stable_when_other_code_changes(tmp_path: Path) -> None:
    path = tmp_path / "src" / "module.py"
    path.parent.mkdir()
    before = "def first():\n    return 1 + 2\n\n\ndef second():\n    return 3 < 4\n"
    path.write_text(before)
    chosen = {one.job_id for one in sample([path], 100, seed=1)}
    path.write_text(
        before.replace("def second", "def between(x: int | None):\n    x -= 5\n\n\ndef second")
    )
    assert chosen < {one.job_id for one in sample([path], 100, seed=1)}
