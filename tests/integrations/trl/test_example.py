"""The example trains and replays groups."""

from __future__ import annotations

from pathlib import Path

from examples import trl_grpo


def test_the_example_replays(tmp_path: Path) -> None:
    logs = trl_grpo.train(f"sqlite:///{tmp_path}/grpo.db", str(tmp_path), steps=12)
    assert len(logs) == 12
    assert logs[0]["replay/replayed"] == 0.0  # no groups are stored before the first step
    assert sum(log["replay/replayed"] for log in logs) > 0.0
    assert all(log["replay/replayed"] <= log["replay/uninformative"] for log in logs)
