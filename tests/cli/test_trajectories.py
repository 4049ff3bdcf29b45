"""`replaydb trajectories`: tables and JSON."""

from __future__ import annotations

import asyncio

from replaydb import Store
from support.agents import turn
from support.command import json_of, rows_of, run


def test_trajectories_are_listed_and_released(filled_url: str) -> None:
    async def opened() -> str:
        async with Store.open(filled_url) as store:
            buffer = await store.buffer("math")
            await buffer.open_group("agents", "g", 3, min_episodes=1)
            [claim] = await buffer.claim(ttl=600, owner="worker-0", tasks="agents")
            await claim.append_turn(turn("call-1"))
            await buffer.fail_episode("g", 2, "timeout")
            return claim.uid

    uid = asyncio.run(opened())
    words = ("trajectories", "list", "math", "--task", "agents")
    listed = json_of(*words, url=filled_url)
    assert [(one["position"], one["num_turns"]) for one in listed] == [(0, 1), (1, 0), (2, 0)]
    for name in ("g", str(listed[0]["group_id"])):
        assert json_of(*words, "--group", name, url=filled_url) == listed
    for wrong, message in (
        (("--group", "other"), "no such groups in this buffer: other"),
        (("--task", "other"), "existing: 'agents'"),
    ):
        refused = run(*words[:3], *wrong, url=filled_url)
        assert refused.exit_code == 1
        assert message in refused.stderr
    assert len(json_of(*words, "--limit", "1", url=filled_url)) == 1
    rows = rows_of(run(*words, url=filled_url))
    assert ["g", "agents", "0", "episode", "1", "0", uid, "worker-0"] in [row[:8] for row in rows]
    assert "timeout" in rows[-1]
    release = ("trajectories", "release", "math", uid)
    assert f"claim {uid} has ended" in run(*release, url=filled_url).output
    [first, *_] = json_of(*words, url=filled_url)
    assert (first["claim_uid"], first["attempts"]) == (None, 1)
    assert f"claim {uid} had ended before" in run(*release, url=filled_url).output
