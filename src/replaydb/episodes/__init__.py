"""Turns, episodes and groups: the data model, without a database."""

from replaydb.episodes.episode import CORE_FIELDS, Episode
from replaydb.episodes.group import EpisodeGroup, GroupStatus
from replaydb.episodes.turns import Turn

__all__ = ["CORE_FIELDS", "Episode", "EpisodeGroup", "GroupStatus", "Turn"]
