"""Prometheus collectors of buffer metrics. Needs the extra `replaydb[prometheus]`."""

from __future__ import annotations

import logging
import re
import time
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping
from threading import Lock

from replaydb import blocking
from replaydb.domain import checks
from replaydb.util import extras

extras.need("prometheus", "replaydb.training.prometheus")

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from replaydb.errors import DatabaseUnavailableError, SchemaError, UnknownBufferError

logger = logging.getLogger(__name__)

#: Help texts of counters.
COUNTERS = {
    "gen_groups": "Groups put since the buffer was created, without replacements.",
    "gen_replaced": "Puts that replaced the content of a group since the buffer was created.",
    "gen_task": "Groups put since the buffer was created, without replacements, by task.",
    "train_drawn": "Groups drawn since the buffer was created; a group counts once for each draw.",
    "train_task": "Groups drawn since the buffer was created, by task.",
}

#: Help texts of gauges.
GAUGES = {
    "gen_recent_groups": "Groups put since the first of the recent draws.",
    "gen_reward_mean": "Mean reward of recently put groups.",
    "gen_reward_std": "Mean reward standard deviation within recently put groups.",
    "gen_uninformative": "Fraction of zero-variance groups among recently put groups.",
    "buffer_groups": "Stored groups, without archived ones.",
    "buffer_episodes": "Stored episodes, without those of archived groups.",
    "buffer_tokens": "Stored tokens, without those of archived groups.",
    "buffer_bytes": "Payload bytes of groups that are not archived.",
    "buffer_status": "Groups by status.",
    "buffer_task": "Groups by task and status.",
    "buffer_dropped": "Groups that are expired, failed or filtered.",
    "buffer_deleted": "Groups that were put and have been deleted.",
    "buffer_unsampled": "Completed groups that were never drawn.",
    "buffer_reward_mean": "Mean reward of completed groups.",
    "buffer_starved_tasks": "Tasks without completed groups.",
    "buffer_age_mean": "Mean age of completed groups, in seconds since they were put.",
    "buffer_age_max": "Maximum age of completed groups, in seconds since they were put.",
    "buffer_wait_mean": "Mean time from completion to the first draw, in seconds.",
    "buffer_wait_max": "Maximum time from completion to the first draw, in seconds.",
    "buffer_staleness_mean": "Mean staleness of completed groups, in policy versions.",
    "buffer_staleness_max": "Maximum staleness of completed groups, in policy versions.",
    "buffer_staleness_groups": "Completed groups by staleness, in policy versions.",
    "buffer_policy_version": "Policy version of the buffer.",
    "replay_groups": "Groups of the recent draws that had been drawn before.",
    "replay_deleted": "Of these, groups deleted since, whose rewards are unknown.",
    "replay_share": "Fraction of the groups of the recent draws that had been drawn before.",
    "replay_samples_per_insert": "Groups drawn for each group put, since the buffer was created.",
    "replay_reward_mean": "Mean reward of the groups that had been drawn before.",
    "replay_staleness_mean": "Mean staleness at the draw of the groups that had been drawn before.",
    "train_draws": "Number of recent draws that these metrics cover.",
    "train_groups": "Groups of the recent draws.",
    "train_deleted": "Of these, groups deleted since, whose rewards are unknown.",
    "train_tokens": "Tokens of the recent draws.",
    "train_unique": "Fraction of distinct groups in the recent draws.",
    "train_reward_mean": "Mean reward of the groups of the recent draws.",
    "train_reward_std": "Mean reward standard deviation within groups of the recent draws.",
    "train_staleness_mean": "Mean staleness at the draw of the groups of the recent draws.",
    "train_staleness_max": "Maximum staleness at the draw of the groups of the recent draws.",
    "train_staleness_groups": "Groups of the recent draws, by staleness at the draw.",
}

#: Families whose metrics have labels besides the buffer, with the pattern of their names.
_LABELED = {
    "buffer_task": r"buffer/task/(?P<task>.*)/(?P<status>[a-z]+)",
    "gen_task": r"gen/task/(?P<task>.*)",
    "train_task": r"train/task/(?P<task>.*)",
    "buffer_staleness_groups": r"buffer/staleness/(?P<bin>[a-z0-9_]+)",
    "train_staleness_groups": r"train/staleness/(?P<bin>[a-z0-9_]+)",
    "buffer_status": r"buffer/status/(?P<status>[a-z]+)",
}


class _Cached(Collector):
    """Collector that caches the metrics of buffers for `max_age` seconds."""

    def __init__(self, draws: int, max_age: float, totals: bool) -> None:
        self.draws = checks.whole_number("draws", draws, least=1)
        self.max_age = checks.number("max_age", max_age, least=0.0)
        self.totals = checks.flag("totals", totals)
        self._lock = Lock()
        self._last: Mapping[str, Mapping[str, float]] = {}
        self._read_at = float("-inf")

    def describe(self) -> list[Metric]:
        """Return no metrics, so that registration does not query the database."""
        return []

    def _numbers(self) -> Mapping[str, Mapping[str, float]]:
        """Return metrics by buffer and name."""
        with self._lock:
            if time.monotonic() - self._read_at > self.max_age:
                self._last = self._read()
                self._read_at = time.monotonic()
            return self._last

    @abstractmethod
    def _read(self) -> Mapping[str, Mapping[str, float]]: ...


class BufferCollector(_Cached):
    """Collector of the metrics of one buffer.

        store = replaydb.blocking.Store.open(url)
        REGISTRY.register(BufferCollector(store.buffer("math")))

    Each scrape calls `Buffer.metrics`, at most once in `max_age` seconds. Metric names are those of
    `Buffer.metrics` with the prefix `replaydb_` and `_` instead of `/`; counters end in `_total`.
    The buffer is a label, and so are statuses, tasks and staleness bins:
    `replaydb_buffer_status{buffer="math",status="completed"}`.

    Attributes:
        buffer: A buffer of a blocking store.
        draws: Number of recent draws to cover, see `Buffer.metrics`; 100 by default.
        max_age: Seconds for which metrics are cached; 5 by default.
        totals: Whether to sum over all groups at each scrape, see `Buffer.metrics`; by default yes.

    Raises:
        InvalidInputError: An argument is invalid.
    """

    def __init__(
        self,
        buffer: blocking.Buffer,
        *,
        draws: int = 100,
        max_age: float = 5.0,
        totals: bool = True,
    ) -> None:
        super().__init__(draws, max_age, totals)
        self.buffer = buffer

    def collect(self) -> Iterator[Metric]:
        """Yield one metric family for each name."""
        yield from _families(self._numbers())

    def _read(self) -> Mapping[str, Mapping[str, float]]:
        return {self.buffer.name: self.buffer.metrics(draws=self.draws, totals=self.totals)}


class StoreCollector(_Cached):
    """Collector of the metrics of several buffers, and of `replaydb_up`; see `BufferCollector`.

    If the database is unavailable, a scrape does not fail: it returns only `replaydb_up`, as 0.

    Attributes:
        store: A blocking store.
        buffers: Names of buffers; None (default) for all buffers at the time of each scrape.
        draws: Number of recent draws to cover, see `Buffer.metrics`; 100 by default.
        max_age: Seconds for which metrics are cached; 5 by default.
        totals: Whether to sum over all groups at each scrape, see `Buffer.metrics`; by default yes.

    Raises:
        InvalidInputError: An argument is invalid.
    """

    def __init__(
        self,
        store: blocking.Store,
        buffers: Collection[str] | None = None,
        *,
        draws: int = 100,
        max_age: float = 5.0,
        totals: bool = True,
    ) -> None:
        super().__init__(draws, max_age, totals)
        self.store = store
        self.buffers = checks.names("buffers", buffers)
        self._lag: float | None = None

    def collect(self) -> Iterator[Metric]:
        """Yield `replaydb_up`, and one metric family of all buffers for each name.

        If the store is on a standby, also yield `replaydb_replication_lag_seconds`.
        """
        up = GaugeMetricFamily("replaydb_up", "1 if the database can be used, else 0.")
        try:
            numbers = self._numbers()
        except (DatabaseUnavailableError, SchemaError) as error:
            logger.warning("no metrics: %s", error)
            numbers = None
        up.add_metric([], float(numbers is not None))
        yield up
        if numbers is not None and self._lag is not None:
            yield GaugeMetricFamily(
                "replaydb_replication_lag_seconds",
                "Seconds by which the standby that is read is behind its primary.",
                self._lag,
            )
        yield from _families(numbers or {})

    def _read(self) -> Mapping[str, Mapping[str, float]]:
        self._lag = self.store.replication_lag()
        names = self.store.buffer_names() if self.buffers is None else self.buffers
        numbers = {}
        for name in sorted(names):
            try:
                buffer = self.store.buffer(name, create=False)
                numbers[name] = buffer.metrics(draws=self.draws, totals=self.totals)
            except UnknownBufferError as error:  # deleted; the other buffers have metrics
                logger.warning("no metrics: %s", error)
        return numbers


def _families(numbers: Mapping[str, Mapping[str, float]]) -> Iterator[Metric]:
    """Yield metric families, each with the samples of all buffers."""
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
    """Return the family and labels of a metric."""
    for family, pattern in _LABELED.items():
        if match := re.fullmatch(pattern, name, re.DOTALL):
            return family, match.groupdict()
    return name.replace("/", "_"), {}
