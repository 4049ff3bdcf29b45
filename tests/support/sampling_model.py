"""Model of a buffer that checks the frequencies of drawn groups."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sqlalchemy import ColumnElement

import replaydb as rdb
from replaydb.buffer.requests import draw_request
from replaydb.database.repository import draws
from replaydb.database.repository.draw_request import Drawn, DrawRequest
from replaydb.database.repository.locked import Scope
from replaydb.database.repository.locking import tasks_locked
from replaydb.database.runtime.session import Session
from replaydb.domain.policies import SamplingPolicy
from support.draw_frequencies import DrawFrequencies

#: More would be slow on PostgreSQL, as scans have to skip row versions of their own transaction.
DRAWS_PER_TRANSACTION = 20


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """A group that the test has put."""

    uid: str
    task: str
    priority: float
    level: int
    label: int


@dataclass(frozen=True, slots=True)
class Filter:
    """A condition as SQL and as a Python function."""

    where: ColumnElement[bool] | None
    holds: Callable[[GroupSpec], bool]


EVERYTHING = Filter(None, lambda _: True)


def level_below(limit: int) -> Filter:
    return Filter(rdb.col.reward_mean < float(limit), lambda known: known.level < limit)


def tagged(level: int) -> Filter:
    return Filter(rdb.col.tags["level"].as_integer() == level, lambda known: known.level == level)


@dataclass(slots=True)
class SamplingModel:
    """A buffer with a copy of its groups and statistics of its draws.

    Attributes:
        buffer: The buffer.
        num_labels: Number of labels of groups.
        exponent: `priority_exponent` of the buffer.
        groups: The groups in the buffer, by id.
        by_label: Frequencies by the labels that the test gave to its groups.
        by_previous_draw: Frequencies by the group's role in the previous draw: 0 drawn, 1 eligible
            but not drawn, 2 not eligible.
    """

    buffer: rdb.Buffer
    num_labels: int
    exponent: float = 1.0
    groups: dict[int, GroupSpec] = field(default_factory=dict)
    by_label: DrawFrequencies = field(init=False)
    by_previous_draw: DrawFrequencies = field(init=False)
    _past: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.by_label = DrawFrequencies(self.num_labels)
        self.by_previous_draw = DrawFrequencies(3)

    async def put(self, several: Sequence[GroupSpec]) -> None:
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
        """Draw and add the results to the frequencies."""
        wanted = request(n, policy, tasks=tasks, where=condition.where)
        weights = self._weights(policy, condition, tasks)
        labels = {one: known.label for one, known in self.groups.items()}
        for drawn in await draw_often(self.buffer, wanted, times):
            past = {one: self._past.get(one, 2) for one in self.groups}
            self.by_label.add(drawn.ids, weights, labels)
            self.by_previous_draw.add(drawn.ids, weights, past)
            self._past = {one: 0 if one in drawn.ids else 1 for one in weights}

    def check(self, least: float = 0.001) -> None:
        """Assert that no class was drawn significantly too often or too rarely."""
        report = {"label": self.by_label.p_value(), "past": self.by_previous_draw.p_value()}
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


def to_group(known: GroupSpec, policy_version: int | None = 0) -> rdb.EpisodeGroup:
    """Return a minimal group to put."""
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
    """Return the request that `Buffer.sample` creates from these arguments."""
    given: dict[str, Any] = dict.fromkeys(("tasks", "where", "max_staleness", "runs", "at_least"))
    return draw_request(n, policy, **given | more)


async def draw_often(buffer: rdb.Buffer, wanted: DrawRequest, times: int) -> list[Drawn]:
    """Draw without reading payloads, several draws per transaction, to be fast."""

    def several(count: int) -> Callable[[Scope, Session], list[Drawn]]:
        def work(scope: Scope, session: Session) -> list[Drawn]:
            drawn = []
            for _ in range(count):
                with tasks_locked(session, scope, wanted.tasks) as locked:
                    drawn.append(draws.draw(locked, wanted))
            return drawn

        return work

    drawn: list[Drawn] = []
    while len(drawn) < times:
        try:
            drawn += await buffer._write(several(min(DRAWS_PER_TRANSACTION, times - len(drawn))))
        except draws.LongScanError:
            assert times == 1, "the draws that it rolls back are not independent of it"
            wanted = await buffer._evaluated(wanted, None)
    return drawn
