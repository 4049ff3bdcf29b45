"""Stored groups: attributes that do not need their episodes."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replaydb.batch import Batch
from replaydb.batch.stored import StoredGroup
from replaydb.database.tables import records
from replaydb.domain.episodes import Episode, EpisodeGroup
from replaydb.domain.episodes.context import GroupContext
from replaydb.domain.episodes.merging import merge_turns
from support import samples
from support.batches import ROW, stored_group
from support.examples import examples
from support.groups import episode

SCALARS = (
    "num_episodes", "num_tokens", "num_loss_tokens", "reward_mean", "reward_std", "reward_min",
    "reward_max", "min_policy_version", "max_policy_version",
)  # fmt: skip


def test_texts_of_an_incomplete_group() -> None:
    """The second of four episodes is missing: texts have the positions among all four."""
    texts = {0: "first", 2: None, 3: "last"}
    several = {position: episode(text=text) for position, text in texts.items()}
    made = StoredGroup(ROW, several, GroupContext())
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
        rows, _ = merge_turns(given_episode) if given_episode.turns else ([], None)
        lengths = [len(row.episode.token_ids) for row in rows] or [len(given_episode.token_ids)]
        assert facts.pop("longest_row") == max(lengths)
        assert facts["num_tokens"] == sum(lengths)
        turns = given_episode.turns if given_episode.finish_reason is None else ()
        assert facts.pop("finish_reason") == (turns or (given_episode,))[-1].finish_reason
        assert facts == {name: getattr(given_episode, name) for name in facts}


def test_episodes_that_share_a_prompt() -> None:
    """Stored episodes have the tokens of their prompt once."""
    prompt = list(range(40))
    given = [
        Episode(
            prompt_ids=prompt,
            response_ids=[i] * i,
            token_extras={"x": np.arange(1, 41 + i)},
            logprobs=-np.arange(i, dtype=np.float32),
        )
        for i in range(3)
    ]
    stored = stored_group(given)
    assert stored.episodes[2].segments[0].parent is not None
    new, read = (Batch([group]).padded(9) for group in (EpisodeGroup("t", given), stored))
    assert read.token_ids[2].tolist() == [*prompt, 2, 2]
    for name in ("token_ids", "loss_mask", "logprobs"):
        assert torch.equal(getattr(new, name), getattr(read, name))
    assert torch.equal(new.token_extras["x"], read.token_extras["x"])
