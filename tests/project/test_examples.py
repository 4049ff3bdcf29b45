"""The examples run and reach their rewards."""

from __future__ import annotations

from pathlib import Path

import pytest
from examples import async_admission, grpo_replay, off_policy

from support.engines import postgresql_nightly


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
