"""Metrics of buffers for Prometheus; needs the extra `replaydb[prometheus]`."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from threading import Lock

from replaydb import blocking, checks, extras

extras.need("prometheus", "replaydb.training.prometheus")

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from replaydb.errors import DatabaseUnavailableError, UnknownBufferError

logger = logging.getLogger(__name__)

#: Families of metrics that only grow.
COUNTERS = {
    "gen_groups": "Groups ever put.",
    "gen_task": "Groups ever put, by task.",
    "train_drawn": "Draws of groups since the buffer was made; a group counts for each draw.",
    "train_task": "Draws of groups since the buffer was made, by task.",
}

#: All other families.
GAUGES = {
    "gen_recent_groups": "Groups put since the first of the recent draws.",
    "gen_reward_mean": "Mean reward of the groups put recently.",
    "gen_reward_std": "Mean over the groups put recently of the deviation of their rewards.",
    "gen_uninformative": "Share of the groups put recently whose rewards are all equal.",
    "buffer_groups": "Groups that are stored, without archived ones.",
    "buffer_episodes": "Episodes that are stored, without those of archived groups.",
    "buffer_tokens": "Tokens that are stored, without those of archived groups.",
    "buffer_bytes": "Bytes of the payloads of groups that are not archived.",
    "buffer_status": "Groups by status.",
    "buffer_task": "Groups by task and status.",
    "buffer_dropped": "Groups that are expired, failed or filtered.",
    "buffer_deleted": "Groups that were put and are no longer there.",
    "buffer_unsampled": "Groups that can be drawn and never were.",
    "buffer_reward_mean": "Mean reward of the groups that can be drawn.",
    "buffer_starved_tasks": "Tasks that have nothing to draw.",
    "buffer_age_mean": "Mean seconds since the groups that can be drawn were put.",
    "buffer_age_max": "Most seconds since a group that can be drawn was put.",
    "buffer_wait_mean": "Mean seconds from completion to the first draw.",
    "buffer_wait_max": "Most seconds from completion to the first draw.",
    "buffer_staleness_mean": "Mean policy versions that groups that can be drawn are behind.",
    "buffer_staleness_max": "Most policy versions that a group that can be drawn is behind.",
    "buffer_staleness_groups": "Groups that can be drawn, by policy versions behind.",
    "buffer_policy_version": "Policy version of the buffer.",
    "replay_groups": "Groups of the recent draws that an earlier draw had taken.",
    "replay_deleted": "Those of them that are no longer there, whose rewards are unknown.",
    "replay_share": "Their share of the groups of the recent draws.",
    "replay_samples_per_insert": "Draws of groups for each group put, since the buffer was made.",
    "replay_reward_mean": "Mean reward of the groups drawn again.",
    "replay_staleness_mean": "Mean staleness of the groups drawn again, at the draw.",
    "train_draws": "Recent draws that these metrics are about.",
    "train_groups": "Groups of the recent draws.",
    "train_deleted": "Those of them that are no longer there, whose rewards are unknown.",
    "train_tokens": "Tokens of the recent draws.",
    "train_unique": "Share of distinct groups in the recent draws.",
    "train_reward_mean": "Mean reward of the groups of the recent draws.",
    "train_reward_std": "Mean over the groups of the recent draws of the deviation of rewards.",
    "train_staleness_mean": "Mean staleness of the groups of the recent draws, at the draw.",
    "train_staleness_max": "Highest staleness of a group of the recent draws, at the draw.",
    "train_staleness_groups": "Groups of the recent draws, by staleness at the draw.",
}

_TASK = re.compile(r"buffer/task/(?P<task>.*)/(?P<status>[a-z]+)", re.DOTALL)
_COUNTED_TASK = re.compile(r"(?P<side>gen|train)/task/(?P<task>.*)", re.DOTALL)
_BIN = re.compile(r"(?P<side>buffer|train)/staleness/(?P<bin>[a-z0-9_]+)")
_STATUS = re.compile(r"buffer/status/(?P<status>[a-z]+)")


class BufferCollector(Collector):
    """Asks for `Buffer.metrics` when it is scraped, at most every `max_age` seconds.

        store = replaydb.blocking.Store.open(url)
        REGISTRY.register(BufferCollector(store.buffer("math")))

    Names are those of `Buffer.metrics` with `replaydb_` before them and `_` for `/`, labelled with
    `buffer`; what only grows is a counter, and ends in `_total`. What a name would hold of
    statuses, tasks and bins of staleness are labels: `replaydb_buffer_status{status="completed"}`.

    Attributes:
        buffer: A buffer of a blocking store.
        draws: See `Buffer.metrics`.
        max_age: Seconds that an answer is given again.

    Raises:
        InvalidInputError: An argument is wrong.
    """

    def __init__(self, buffer: blocking.Buffer, *, draws: int = 100, max_age: float = 5.0) -> None:
        self.buffer = buffer
        self.draws = checks.whole_number("draws", draws, least=1)
        self.max_age = checks.number("max_age", max_age, least=0.0)
        self._cached = _Cached(self._ask, self.max_age)

    def collect(self) -> Iterator[Metric]:
        """One family for each name."""
        yield from _families(self._cached.numbers())

    def describe(self) -> list[Metric]:
        """Nothing, so that registering does not ask the database."""
        return []

    def _ask(self) -> Mapping[str, Mapping[str, float]]:
        return {self.buffer.name: self.buffer.metrics(draws=self.draws)}


class StoreCollector(Collector):
    """As `BufferCollector`, for several buffers of a store, and whether the store can be reached.

    Where the database is not there, only `replaydb_up` is given, as 0: a scrape does not fail.

    Attributes:
        store: A blocking store.
        buffers: Names of buffers; None: all that there are when it is scraped.
        draws: See `Buffer.metrics`.
        max_age: Seconds that an answer is given again.

    Raises:
        InvalidInputError: An argument is wrong.
    """

    def __init__(
        self,
        store: blocking.Store,
        buffers: Collection[str] | None = None,
        *,
        draws: int = 100,
        max_age: float = 5.0,
    ) -> None:
        self.store = store
        self.buffers = checks.names("buffers", buffers)
        self.draws = checks.whole_number("draws", draws, least=1)
        self.max_age = checks.number("max_age", max_age, least=0.0)
        self._cached = _Cached(self._ask, self.max_age)

    def collect(self) -> Iterator[Metric]:
        """One family for each name, of all buffers, and `replaydb_up`."""
        up = GaugeMetricFamily("replaydb_up", "1 where the database answers, 0 where it does not.")
        try:
            numbers = self._cached.numbers()
        except DatabaseUnavailableError as error:
            logger.warning("no metrics: %s", error)
            numbers = None
        up.add_metric([], float(numbers is not None))
        yield up
        yield from _families(numbers or {})

    def describe(self) -> list[Metric]:
        """Nothing, so that registering does not ask the database."""
        return []

    def _ask(self) -> Mapping[str, Mapping[str, float]]:
        if self.buffers is None:
            names = frozenset(info.name for info in self.store.buffers())
        else:
            names = self.buffers
        numbers = {}
        for name in sorted(names):
            try:
                buffer = self.store.buffer(name, create=False)
                numbers[name] = buffer.metrics(draws=self.draws)
            except UnknownBufferError as error:  # deleted: the others are there
                logger.warning("no metrics: %s", error)
        return numbers


class _Cached:
    """Numbers of buffers, asked for again when they are old."""

    def __init__(
        self, ask: Callable[[], Mapping[str, Mapping[str, float]]], max_age: float
    ) -> None:
        self._ask = ask
        self._max_age = max_age
        self._lock = Lock()
        self._numbers: Mapping[str, Mapping[str, float]] = {}
        self._asked_at = float("-inf")

    def numbers(self) -> Mapping[str, Mapping[str, float]]:
        """By buffer and name."""
        with self._lock:
            if time.monotonic() - self._asked_at > self._max_age:
                self._numbers = self._ask()
                self._asked_at = time.monotonic()
            return self._numbers


def _families(numbers: Mapping[str, Mapping[str, float]]) -> Iterator[Metric]:
    """Metrics of buffers, those of one name together."""
    families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
    for buffer, metrics in numbers.items():
        for name, number in metrics.items():
            family, labels = _parsed(name)
            if family not in families:
                families[family] = _family(family, ["buffer", *labels])
            families[family].add_metric([buffer, *labels.values()], number)
    yield from families.values()


def _family(name: str, labels: list[str]) -> CounterMetricFamily | GaugeMetricFamily:
    if name in COUNTERS:
        return CounterMetricFamily(f"replaydb_{name}", COUNTERS[name], labels=labels)
    return GaugeMetricFamily(f"replaydb_{name}", GAUGES[name], labels=labels)


def _parsed(name: str) -> tuple[str, dict[str, str]]:
    """Family and labels of a metric."""
    if match := _TASK.fullmatch(name):
        return "buffer_task", match.groupdict()
    if match := _COUNTED_TASK.fullmatch(name):
        return f"{match['side']}_task", {"task": match["task"]}
    if match := _BIN.fullmatch(name):
        return f"{match['side']}_staleness_groups", {"bin": match["bin"]}
    if match := _STATUS.fullmatch(name):
        return "buffer_status", match.groupdict()
    return name.replace("/", "_"), {}
