"""Turns, episodes and groups: the data model, without a database."""

from replaydb.domain.episodes.building import CORE_FIELDS
from replaydb.domain.episodes.episode import Episode
from replaydb.domain.episodes.group import EpisodeGroup, GroupStatus
from replaydb.domain.episodes.ragged import Ragged
from replaydb.domain.episodes.turns import Turn

__all__ = ["CORE_FIELDS", "Episode", "EpisodeGroup", "GroupStatus", "Ragged", "Turn"]
