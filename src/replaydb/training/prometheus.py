"""Metrics of buffers for Prometheus; needs the extra `replaydb[prometheus]`."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from threading import Lock

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from replaydb import blocking, checks

_TASK = re.compile(r"buffer/task/(?P<task>.*)/(?P<status>[a-z]+)", re.DOTALL)
_BIN = re.compile(r"(?P<side>buffer|train)/staleness/(?P<bin>[a-z0-9_]+)")
_STATUS = re.compile(r"buffer/status/(?P<status>[a-z]+)")


class BufferCollector(Collector):
    """Asks for `Buffer.metrics` when it is scraped, at most every `max_age` seconds.

        store = replaydb.blocking.Store.open(url)
        REGISTRY.register(BufferCollector(store.buffer("math")))

    Names are those of `Buffer.metrics` with `replaydb_` before them and `_` for `/`, all gauges,
    labelled with `buffer`. What a name would hold of statuses, tasks and bins of staleness are
    labels: `replaydb_buffer_status{status="completed"}`.

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
        self._lock = Lock()
        self._numbers: Mapping[str, float] = {}
        self._asked_at = float("-inf")

    def collect(self) -> Iterator[Metric]:
        """One family for each name."""
        families: dict[str, GaugeMetricFamily] = {}
        for name, number in self._fresh().items():
            family, labels = _parsed(name)
            if family not in families:
                text = f"replaydb: {family} of Buffer.metrics"
                families[family] = GaugeMetricFamily(
                    f"replaydb_{family}", text, labels=["buffer", *labels]
                )
            families[family].add_metric([self.buffer.name, *labels.values()], number)
        yield from families.values()

    def describe(self) -> list[Metric]:
        """Nothing, so that registering does not ask the database."""
        return []

    def _fresh(self) -> Mapping[str, float]:
        with self._lock:
            if time.monotonic() - self._asked_at > self.max_age:
                self._numbers = self.buffer.metrics(draws=self.draws)
                self._asked_at = time.monotonic()
            return self._numbers


def _parsed(name: str) -> tuple[str, dict[str, str]]:
    """Family and labels of a metric."""
    if match := _TASK.fullmatch(name):
        return "buffer_task", match.groupdict()
    if match := _BIN.fullmatch(name):
        return f"{match['side']}_staleness_groups", {"bin": match["bin"]}
    if match := _STATUS.fullmatch(name):
        return "buffer_status", match.groupdict()
    return name.replace("/", "_"), {}
