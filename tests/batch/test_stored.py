"""Stored groups: attributes that do not need their episodes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replaydb.batch.stored import StoredGroup
from replaydb.database.tables import records
from replaydb.domain.episodes import Episode, EpisodeGroup, flat
from replaydb.domain.episodes.flat import flatten
from support import samples
from support.batches import ROW, stored_group
from support.examples import examples
from support.groups import episode

SCALARS = (
    "num_episodes", "num_tokens", "num_loss_tokens", "reward_mean", "reward_std", "reward_min",
    "reward_max", "min_policy_version", "max_policy_version",
)  # fmt: skip


def test_scalars_build_no_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("an episode was built")

    made = stored_group(samples.sample_episodes())
    with monkeypatch.context() as patch:
        patch.setattr(flat, "trusted", refuse)
        for name in (*SCALARS, "rewards", "advantages", "texts"):
            getattr(made, name)
        records.to_record(EpisodeGroup("t", samples.sample_episodes()), None)
    assert made.episodes == tuple(samples.sample_episodes())


def test_texts_of_an_incomplete_group() -> None:
    """The second of four episodes is missing: texts have the positions among all four."""
    made = StoredGroup(
        ROW, {position: flatten([episode()]) for position in (0, 2, 3)}, {0: "first", 3: "last"}
    )
    assert [one.text for one in made.episodes] == made.texts == ["first", None, "last"]
    assert [row["position"] for row in records.to_record(made, None).transcripts] == [0, 2]


@settings(max_examples=examples(50), deadline=None)
@given(st.lists(samples.episode(), min_size=1, max_size=4))
def test_scalars_equal_those_of_the_put_group(episodes: list[Episode]) -> None:
    """Whether it is stored in one part or several, and its row has the same values."""
    given = EpisodeGroup("task", episodes)
    stored = stored_group(episodes)
    row = records.to_record(given, None)
    for name in SCALARS:
        assert getattr(stored, name) == getattr(given, name)
    for name in set(SCALARS) - {"num_loss_tokens"}:
        assert row.facts[name] == getattr(given, name)
    np.testing.assert_array_equal(stored.rewards, given.rewards)
    assert [one["position"] for one in row.episodes] == list(range(len(episodes)))
    for one, given_episode in zip(row.episodes, episodes, strict=True):
        facts = {name: value for name, value in one.items() if name != "position"}
        assert facts == {name: getattr(given_episode, name) for name in facts}
