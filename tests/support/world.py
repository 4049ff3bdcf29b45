"""A buffer together with what a draw from it should do."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sqlalchemy import ColumnElement, Connection

import replaydb as rdb
from replaydb.buffer.requests import draw_request
from replaydb.database.repository import draws
from replaydb.database.repository.locked import Scope
from replaydb.database.repository.locking import tasks_locked
from replaydb.database.repository.portions import Drawn, DrawRequest
from replaydb.policies import SamplingPolicy
from support.tally import Tally

#: More would be slow on PostgreSQL: what one transaction has updated stays in the way of its scans.
DRAWS_PER_TRANSACTION = 20


@dataclass(frozen=True, slots=True)
class Known:
    """A group as the test put it."""

    uid: str
    task: str
    priority: float
    level: int
    label: int


@dataclass(frozen=True, slots=True)
class Filter:
    """The same condition for the database and for the test."""

    where: ColumnElement[bool] | None
    holds: Callable[[Known], bool]


EVERYTHING = Filter(None, lambda _: True)


def level_below(limit: int) -> Filter:
    return Filter(rdb.col.reward_mean < float(limit), lambda known: known.level < limit)


def tagged(level: int) -> Filter:
    return Filter(rdb.col.tags["level"].as_integer() == level, lambda known: known.level == level)


@dataclass(slots=True)
class World:
    """Puts, deletes and draws, keeping two tallies of what is drawn.

    Attributes:
        groups: What is in the buffer, by id.
        by_label: Tally of the labels that the test gave its groups.
        by_past: Tally of what the draw before did about a group: 0 took it, 1 might have, 2 not.
    """

    buffer: rdb.Buffer
    num_labels: int
    exponent: float = 1.0
    groups: dict[int, Known] = field(default_factory=dict)
    by_label: Tally = field(init=False)
    by_past: Tally = field(init=False)
    _past: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.by_label = Tally(self.num_labels)
        self.by_past = Tally(3)

    async def put(self, several: Sequence[Known]) -> None:
        ids = await self.buffer.put([to_group(known) for known in several])
        self.groups |= dict(zip(ids, several, strict=True))

    async def delete(self, ids: Collection[int]) -> None:
        await self.buffer.delete(ids)
        for one in ids:
            del self.groups[one]

    async def prioritize(self, priorities: Mapping[int, float]) -> None:
        await self.buffer.update_priorities(priorities.keys(), priorities.values())
        for one, priority in priorities.items():
            self.groups[one] = replace(self.groups[one], priority=priority)

    async def draw(
        self,
        times: int,
        n: int,
        policy: SamplingPolicy,
        condition: Filter = EVERYTHING,
        tasks: frozenset[str] | None = None,
    ) -> None:
        """Draw, and enter in the tallies what came."""
        wanted = request(n, policy, tasks=tasks, where=condition.where)
        weights = self._weights(policy, condition, tasks)
        labels = {one: known.label for one, known in self.groups.items()}
        for drawn in await draw_often(self.buffer, wanted, times):
            past = {one: self._past.get(one, 2) for one in self.groups}
            self.by_label.add(drawn.ids, weights, labels)
            self.by_past.add(drawn.ids, weights, past)
            self._past = {one: 0 if one in drawn.ids else 1 for one in weights}

    def check(self, least: float = 0.001) -> None:
        """Nothing was drawn more or less often than it should."""
        report = {"label": self.by_label.p_value(), "past": self.by_past.p_value()}
        assert min(report.values()) > least, report

    def _weights(
        self, policy: SamplingPolicy, condition: Filter, tasks: frozenset[str] | None
    ) -> dict[int, float]:
        power = self.exponent if isinstance(policy, rdb.Prioritized) else 0.0
        return {
            one: known.priority**power
            for one, known in self.groups.items()
            if condition.holds(known) and (tasks is None or known.task in tasks)
        }


def to_group(known: Known, policy_version: int | None = 0) -> rdb.EpisodeGroup:
    """A group that is as small as they get."""
    episode = rdb.Episode(
        prompt_ids=[1], response_ids=[2], reward=known.level, policy_version=policy_version
    )
    return rdb.EpisodeGroup(
        task_name=known.task,
        group_uid=known.uid,
        priority=known.priority,
        tags={"level": known.level},
        episodes=[episode],
    )


def request(n: int | Mapping[str, int], policy: SamplingPolicy, **more: Any) -> DrawRequest:
    """What `Buffer.sample` makes of its arguments."""
    given: dict[str, Any] = dict.fromkeys(("tasks", "where", "max_staleness", "runs", "at_least"))
    return draw_request(n, policy, **given | more)


async def draw_often(buffer: rdb.Buffer, wanted: DrawRequest, times: int) -> list[Drawn]:
    """Draws without reading payloads, some to a transaction: much faster than `Buffer.sample`."""

    def some(count: int) -> Callable[[Connection, Scope], list[Drawn]]:
        def work(connection: Connection, scope: Scope) -> list[Drawn]:
            drawn = []
            for _ in range(count):
                with tasks_locked(connection, scope, wanted.tasks) as locked:
                    drawn.append(draws.draw(locked, wanted))
            return drawn

        return work

    drawn: list[Drawn] = []
    while len(drawn) < times:
        drawn += await buffer._write(some(min(DRAWS_PER_TRANSACTION, times - len(drawn))))
    return drawn
