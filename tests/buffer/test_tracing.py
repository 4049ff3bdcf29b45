"""Spans around calls, and metrics for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry, generate_latest

from replaydb import Buffer, Fifo, GroupStatus, NotEnoughGroupsError, blocking
from replaydb.buffer import tracing
from replaydb.training.prometheus import BufferCollector
from support.groups import group, groups


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    found = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(found))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    yield found
    provider.shutdown()


def attributes(span: ReadableSpan) -> dict[str, object]:
    return dict(span.attributes or {})


async def test_calls_are_spans(buffer: Buffer, exporter: InMemorySpanExporter) -> None:
    await buffer.put(groups(3))
    await buffer.sample(2)
    async with buffer.lease(1, Fifo(), ttl=60):
        pass
    spans = [one for one in exporter.get_finished_spans() if one.parent is None]
    assert [span.name for span in spans] == [
        "replaydb.Buffer.put",
        "replaydb.Buffer.sample",
        "replaydb.Buffer.lease",
        "replaydb.Lease.ack",
    ]
    assert attributes(spans[0]) == {"replaydb.buffer": "math", "replaydb.count": 3}
    assert attributes(spans[2]) == {"replaydb.buffer": "math", "replaydb.count": 1}


async def test_errors_are_recorded(buffer: Buffer, exporter: InMemorySpanExporter) -> None:
    with pytest.raises(NotEnoughGroupsError):
        await buffer.sample(2)
    (span,) = exporter.get_finished_spans()
    assert span.status.status_code is trace.StatusCode.ERROR
    assert attributes(span)["error.type"] == "NotEnoughGroupsError"


def test_without_opentelemetry_methods_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    class Plain:
        async def call(self) -> None:
            pass

    method = Plain.call
    monkeypatch.setattr(tracing, "_IS_INSTALLED", False)
    assert tracing.traced(Plain).call is method
    monkeypatch.undo()
    assert tracing.traced(Plain).call is not method


def test_scraping(url: str) -> None:
    registry = CollectorRegistry()
    with blocking.Store.open(url) as store:
        buffer = store.buffer("math")
        buffer.put([*groups(2), group("x", "code/python", status=GroupStatus.FILTERED)])
        buffer.sample(1)
        registry.register(BufferCollector(buffer))
        text = generate_latest(registry).decode()
        buffer.put(groups(1, "later"))
        assert generate_latest(registry).decode() == text
        registry.register(BufferCollector(store.buffer("other"), max_age=0.0))
        store.buffer("other").put(group())
        fresh = generate_latest(registry).decode()
    assert 'replaydb_gen_groups_total{buffer="math"} 3.0' in text
    assert 'replaydb_buffer_status{buffer="math",status="completed"} 2.0' in text
    assert 'replaydb_buffer_task{buffer="math",status="filtered",task="code/python"} 1.0' in text
    assert 'replaydb_train_staleness_groups{bin="0",buffer="math"} 0.0' in text
    assert 'replaydb_gen_groups_total{buffer="other"} 1.0' in fresh
