"""Trace sessions of XTuner's rollout workers."""

from __future__ import annotations

from collections.abc import Iterable

from xtuner.v1.data_proto.rl_data import RolloutState, discard_rollout_state


async def release_existing_sessions(session_ids: Iterable[str]) -> set[str]:
    """Release those of the sessions that exist. Tests replace this function."""
    return set()


async def release_and_discard_rollout_groups(groups: list[list[RolloutState]]) -> None:
    """Release the sessions of groups, in one call, and empty their states."""
    states = [state for group in groups for state in group]
    await release_existing_sessions([
        str(state.session_id) for state in states if state.session_id is not None
    ])  # fmt: skip
    for state in states:
        discard_rollout_state(state)
