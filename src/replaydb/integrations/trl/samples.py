"""Conversion of `AsyncGRPOTrainer`'s `RolloutSample` to groups, and back."""

from __future__ import annotations

import math

import numpy as np
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from replaydb import Episode, EpisodeGroup, InvalidInputError
from replaydb.integrations.trl import chats


def to_group(sample: RolloutSample, source: str = "") -> EpisodeGroup:
    """Convert a sample to a group of one episode: upstream puts samples one by one.

    Args:
        sample: The sample. Its messages and metrics must be JSON, except for NaN metrics.
        source: Identifies the buffer that numbered its `group_id`. Samples with the same source and
            `group_id` share a `prompt_uid`.

    Raises:
        InvalidInputError: The sample cannot be stored.
    """
    try:
        metrics = {name: None if math.isnan(x) else float(x) for name, x in sample.metrics.items()}
    except TypeError as error:
        raise InvalidInputError("metrics", "numbers", repr(sample.metrics)) from error
    episode = Episode(
        token_ids=sample.input_ids,
        loss_mask=sample.completion_mask,
        logprobs=sample.old_log_probs,
        reward=metrics.get("reward"),
        advantage=sample.advantage,
        policy_version=sample.model_version,
        metadata={
            **chats.to_metadata(sample.completion),
            "metrics": metrics,
            "group_id": int(sample.group_id),
            "enqueued_at": sample.enqueued_at,
            "source": source,
        },
        text=chats.to_text(sample.completion),
    )
    return EpisodeGroup(
        "rollouts",
        [episode],
        prompt=sample.prompt,
        prompt_uid=f"{source}/{int(sample.group_id)}",
    )


def to_sample(group: EpisodeGroup) -> RolloutSample:
    """Convert a group of `to_group` back to its sample."""
    (episode,) = group.episodes
    data = episode.metadata
    return RolloutSample(
        prompt=group.prompt,
        completion=chats.from_metadata(data),
        input_ids=episode.token_ids.astype(np.int64),
        completion_mask=episode.loss_mask.astype(np.int64),
        old_log_probs=np.array(episode.logprobs),
        advantage=float(episode.advantage or 0.0),
        model_version=int(episode.min_policy_version or 0),
        group_id=data["group_id"],
        metrics={name: math.nan if x is None else x for name, x in data["metrics"].items()},
        enqueued_at=data["enqueued_at"],
    )
