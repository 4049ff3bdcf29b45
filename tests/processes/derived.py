"""Groups whose content is derived from their uid, so that any process can check any group."""

from __future__ import annotations

import hashlib

import numpy as np

from replaydb import Episode, EpisodeGroup

TASKS = ("code", "math")


def derived_group(uid: str) -> EpisodeGroup:
    """Return a group of 200 bytes to 60 KB, in some cases with texts."""
    seed = int.from_bytes(hashlib.blake2b(uid.encode(), digest_size=8).digest(), "little")
    rng = np.random.default_rng(seed)
    episodes = []
    for i in range(int(rng.integers(1, 5))):
        length = int(rng.choice([3, 40, 1500]))
        episodes.append(
            Episode(
                prompt_ids=rng.integers(0, 1000, 3),
                response_ids=rng.integers(0, 1000, length),
                logprobs=rng.standard_normal(length).astype(np.float32),
                reward=float(rng.standard_normal()),
                policy_version=int(rng.integers(0, 3)),
                text=f"{uid}/{i}" if rng.random() < 0.3 else None,
            )
        )
    return EpisodeGroup(
        TASKS[seed % 2], episodes, group_uid=uid, priority=float(rng.choice([0.5, 1.0, 4.0]))
    )


def check_group(found: EpisodeGroup) -> None:
    """Assert that the content of a group is that derived from its uid."""
    expected = derived_group(found.group_uid)
    assert found.task_name == expected.task_name
    assert len(found.episodes) == len(expected.episodes), found.group_uid
    for mine, theirs in zip(found.episodes, expected.episodes, strict=True):
        np.testing.assert_array_equal(mine.token_ids, theirs.token_ids)
        np.testing.assert_array_equal(mine.loss_mask, theirs.loss_mask)
        assert mine.logprobs is not None
        assert theirs.logprobs is not None
        np.testing.assert_array_equal(mine.logprobs, theirs.logprobs)
        facts = [(one.reward, one.policy_version, one.text) for one in (mine, theirs)]
        assert facts[0] == facts[1], found.group_uid
