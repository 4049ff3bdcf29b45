"""The examples run and reach their rewards."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from examples import async_admission, grpo_replay, off_policy
from examples.agents import EPISODES, GROUPS

from support.engines import both_engines, postgresql_nightly


@postgresql_nightly
async def test_grpo_with_replay(url: str) -> None:
    reward, metrics = await grpo_replay.train(url, steps=30)
    assert reward > 0.4
    assert metrics["replay/share"] > 0.1
    assert metrics["gen/groups"] == 30 * grpo_replay.GROUPS_PER_STEP


@pytest.mark.parametrize(
    ("steps", "least"), [(7, 0.11), pytest.param(20, 0.25, marks=pytest.mark.nightly)]
)
@postgresql_nightly
async def test_asynchronous_training_stays_within_the_staleness_admitted(
    url: str, steps: int, least: float
) -> None:
    reward, staleness = await async_admission.run(url, steps=steps)
    assert len(staleness) == steps * async_admission.GROUPS_PER_STEP
    assert max(versions or 0 for versions in staleness) <= async_admission.MAX_STALENESS
    assert None not in staleness
    assert reward > least


def test_off_policy(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/replay.db"
    off_policy.fill(url)
    reward, off = off_policy.train(url, steps=40)
    assert reward > 0.5
    assert 0.0 < off["ratio/ess"] < 1.0


@both_engines
async def test_agents_are_killed_and_continued(engine_name: str, url: str) -> None:
    """The example compares gradients, and the tokens in the losses with SQL."""
    command = [sys.executable, "-m", "examples.agents", "--database", engine_name]
    ended = await asyncio.to_thread(
        subprocess.run,
        command,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"REPLAYDB_URL": url},  # of PostgreSQL; the SQLite file is its own
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    assert "killed 2 workers" in ended.stdout
    found = re.search(r"(\d+) trajectories, (\d+) of several policy versions", ended.stdout)
    assert found is not None, ended.stdout
    assert int(found[1]) == GROUPS * EPISODES - 1  # without the one whose sandbox died
    assert int(found[2]) >= 2  # those of the killed workers
