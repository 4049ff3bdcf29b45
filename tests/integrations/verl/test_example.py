"""The overrides of the documentation, and its example: a killed trainer is resumed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from examples.verl_cpu import configuration
from verl.utils.import_utils import load_class_from_fqn, load_extern_object

from replaydb.integrations.verl import (
    AckOnCheckpoint,
    DurableAgentLoopManager,
    DurableReplayBufferAsync,
)

_CHECKOUT = Path(__file__).resolve().parents[3]
_NUMBERS = re.compile(r"(?:generated|trained) (\[.*?\])")


def _begin(mode: str, url: str) -> subprocess.Popen[str]:
    """Start the example in its own session, which identifies any processes it leaves."""
    return subprocess.Popen(
        [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "examples.verl_restart",
            "--mode",
            mode,
            "--url",
            url,
        ],
        cwd=_CHECKOUT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def _members(session: int) -> list[psutil.Process]:
    found = []
    for one in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getsid(one.pid) == session and one.status() != psutil.STATUS_ZOMBIE:
                found.append(one)
    return found


@pytest.mark.parametrize(
    ("mode", "engine_name"),
    [pytest.param("sync", "sqlite", marks=pytest.mark.nightly), ("colocate_async", "postgresql")],
)
def test_nothing_is_generated_twice_or_lost(url: str, mode: str) -> None:
    run = _begin(mode, url)
    try:
        output, _ = run.communicate(timeout=500)
        assert run.returncode == 0, output
        before, saved, after, trained = map(json.loads, _NUMBERS.findall(output))
        assert before == list(range(14))
        assert sorted(saved) == list(range(8))
        assert sorted(trained) == list(range(20))
        assert len(before + after) == len(set(before + after))
        assert set(range(20)) <= set(before + after)
        assert psutil.wait_procs(_members(run.pid), 10)[1] == []
    finally:
        for one in _members(run.pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()


def test_the_overrides_of_the_page(tmp_path: Path) -> None:
    """verl's configuration accepts them, and they name existing classes."""
    page = (_CHECKOUT / "docs" / "integrations" / "verl.md").read_text(encoding="utf8")
    [lines] = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    config = configuration("colocate_async", tmp_path, shlex.split(lines, comments=True))
    sampler, agent = config.trainer.v1.sampler, config.actor_rollout_ref.rollout.agent
    custom = sampler.custom_sampler
    assert load_extern_object(custom.path, custom.name) is DurableReplayBufferAsync
    assert sampler.sampler_kwargs == {"url": "sqlite:////data/grpo.db", "run": "qwen-7b-a"}
    assert load_class_from_fqn(agent.agent_loop_manager_class) is DurableAgentLoopManager
    assert load_class_from_fqn(config.trainer.checkpoint_callback_class) is AckOnCheckpoint
