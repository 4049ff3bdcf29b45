"""Settings are stored with the buffer and obeyed by every process."""

from __future__ import annotations

import functools
import json
import sys
from dataclasses import fields, replace
from inspect import signature
from typing import Any, get_type_hints

import pytest

import replaydb as rdb
from replaydb import Buffer, BufferSettings, SettingsChanges, Store, blocking
from support.groups import group
from support.other_process import other_process

IMPOSSIBLE: list[dict[str, Any]] = [
    {"max_staleness": -1},
    {"max_staleness": {"gsm8k": -1}},
    {"max_staleness": {1: 1}},
    {"max_staleness": 2**62},
    {"priority_exponent": -0.5},
    {"priority_exponent": float("inf")},
    {"seed": -1},
    {"seed": 2**63},
    {"seed": 0.5},
    {"compression": "gzip"},
    {"keep_archived": 100},
    {"keep_archived": {"count": 100}},
    {"keep_draws": 0},
    {"capacity": {"groups": 5}},
    {"task_capacity": {"a": 5}},
    {"eviction": "youngest"},
    {"on_evict": "hide"},
    {"time_to_live": 0},
    {"time_to_live": 1e300},
    {"max_times_sampled": 0},
    {"max_attempts": 0},
    {"on_ack": "delete"},
    {"rate_limit": rdb.MinSize(6), "capacity": rdb.Capacity(groups=5)},
    {"rate_limit": rdb.Queue(6), "capacity": rdb.Capacity(groups=5)},
    {"rate_limit": rdb.SamplesPerInsert(1, 6, 10), "capacity": rdb.Capacity(groups=5)},
    {"max_stalenes": 4},
]


async def test_settings_have_defaults(buffer: Buffer) -> None:
    assert buffer.settings == BufferSettings()
    assert buffer.policy_version == 0
    assert (buffer.name, repr(buffer)) == ("math", "Buffer('math')")


async def test_given_settings_are_updated_and_others_stay(store: Store) -> None:
    await store.buffer("math", max_staleness=4, seed=7)
    again = await store.buffer("math", max_staleness=2)
    assert again.settings == BufferSettings(max_staleness=2, seed=7)
    await again.update_settings(seed=None, priority_exponent=0.5)
    expected = BufferSettings(max_staleness=2, priority_exponent=0.5)
    assert again.settings == expected
    assert (await store.buffer("math")).settings == expected
    assert (await store.buffers())[0].settings == expected


async def test_all_settings_at_once_and_changes_to_them(store: Store) -> None:
    whole = BufferSettings(max_staleness=4, capacity=rdb.Capacity(groups=9))
    made = await store.buffer("math", whole, seed=7)
    assert made.settings == replace(whole, seed=7)
    again = await store.buffer("math", BufferSettings(max_attempts=2))
    assert again.settings == BufferSettings(max_attempts=2)
    await again.update_settings(whole, max_staleness=None)
    assert again.settings == replace(whole, max_staleness=None)
    assert (await store.buffers())[0].settings == again.settings


def test_changes_have_the_fields_of_the_settings() -> None:
    assert get_type_hints(SettingsChanges) == get_type_hints(BufferSettings)
    for field in fields(BufferSettings):
        wrong: dict[str, Any] = {field.name: object()}
        with pytest.raises(rdb.InvalidSettingsError, match=f"^{field.name}: expected "):
            BufferSettings(**wrong)


async def test_a_type_checker_knows_the_settings(store: Store, buffer: Buffer, url: str) -> None:
    """mypy reports an unnecessary `ignore`."""
    with pytest.raises(rdb.InvalidSettingsError, match="did you mean 'max_staleness'"):
        await store.buffer("math", max_stalenes=4)  # type: ignore[call-arg]
    with pytest.raises(rdb.InvalidSettingsError, match="seed: expected an integer, got '4'"):
        await buffer.update_settings(seed="4")  # type: ignore[arg-type]
    with pytest.raises(rdb.InvalidInputError, match="settings: expected BufferSettings"):
        await buffer.update_settings({"seed": 4})  # type: ignore[arg-type]
    with blocking.Store.open(url) as other:
        with pytest.raises(rdb.InvalidSettingsError):
            other.buffer("math", max_stalenes=4)  # type: ignore[call-arg]
        with pytest.raises(rdb.InvalidSettingsError):
            other.buffer("math").update_settings(max_stalenes=4)  # type: ignore[call-arg]


LIMITED = BufferSettings(
    capacity=rdb.Capacity(groups=5),
    task_capacity={"gsm8k": rdb.Capacity(tokens=7), "code": rdb.Capacity(bytes=9)},
    rate_limit=rdb.SamplesPerInsert(2.0, 1, 40.0),
    keep_archived=rdb.Keep(count=9, seconds=60.0),
    keep_draws=rdb.Keep(seconds=60.0),
)


@pytest.mark.parametrize("settings", [BufferSettings(), LIMITED, BufferSettings(task_capacity={})])
def test_stored_settings_round_trip(settings: BufferSettings) -> None:
    assert BufferSettings.from_json(json.loads(json.dumps(settings.to_json()))) == settings


@pytest.mark.parametrize(
    ("setting", "stored"),
    [
        ("max_entropy", 4),
        ("rate_limit", {"kind": "LeakyBucket", "size": 4}),
        ("rate_limit", {"kind": "Queue", "size": 4, "per": "task"}),
        ("capacity", {"groups": 4, "images": 2}),
        ("task_capacity", {"gsm8k": {"images": 2}}),
        ("keep_draws", {"bytes": 4}),
    ],
)
def test_settings_of_a_newer_version_are_refused(setting: str, stored: Any) -> None:
    reason = f"({setting}: expected |unknown setting '{setting}')"
    with pytest.raises(rdb.ClientTooOldError, match=f"^the settings .* newer replaydb: {reason}"):
        BufferSettings.from_json({setting: stored})


@pytest.mark.parametrize(
    "settings",
    [
        {"max_staleness": {"gsm8k": 2, "数学": 0}, "seed": 2**63 - 1, "compression": "zstd"},
        {"max_staleness": 0, "priority_exponent": 0, "seed": 0},
    ],
    ids=["large", "small"],
)
async def test_settings_are_stored_as_given(
    store: Store, url: str, settings: dict[str, Any]
) -> None:
    made = await store.buffer("math", **settings)
    async with Store.open(url) as second:
        found = await second.buffer("math", create=False)
        assert found.settings == made.settings == BufferSettings(**settings)
        assert (await found.stats()).settings == made.settings


async def test_another_process_sees_changed_settings(store: Store, url: str) -> None:
    buffer = await store.buffer("math", seed=1)
    async with other_process("settings", url, "math") as other:
        await buffer.update_settings(max_staleness={"gsm8k": 2}, compression="zstd")
        assert await other.act() == buffer.settings.to_json()


async def test_impossible_settings_are_refused_before_anything_is_written(store: Store) -> None:
    for settings in IMPOSSIBLE:
        with pytest.raises(rdb.InvalidSettingsError, match=next(iter(settings))):
            await store.buffer("math", **settings)
    assert await store.buffers() == []


async def test_impossible_settings_change_nothing(store: Store) -> None:
    before = BufferSettings(max_staleness=3, compression="zstd")
    buffer = await store.buffer("math", before)
    for settings in IMPOSSIBLE:
        changes = {"max_staleness": 1, "compression": None} | settings
        for call in (store.buffer("math", **changes), buffer.update_settings(**changes)):
            with pytest.raises(rdb.InvalidSettingsError):
                await call
    assert (await store.buffers())[0].settings == buffer.settings == before


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        (rdb.Capacity, {}),
        (rdb.Capacity, {"groups": 0}),
        (rdb.Capacity, {"tokens": -1}),
        (rdb.Capacity, {"bytes": 1.5}),
        (rdb.Keep, {}),
        (rdb.Keep, {"count": 0}),
        (rdb.Keep, {"seconds": 0}),
        (rdb.Keep, {"seconds": "day"}),
        (rdb.MinSize, {"size": 0}),
        (rdb.Queue, {"size": 0}),
        (rdb.SamplesPerInsert, {"ratio": 0.0, "min_size": 1, "error_buffer": 1.0}),
        (rdb.SamplesPerInsert, {"ratio": 1.0, "min_size": 0, "error_buffer": 1.0}),
        (rdb.SamplesPerInsert, {"ratio": 2.0, "min_size": 1, "error_buffer": 1.5}),
        (rdb.SamplesPerInsert, {"ratio": 0.5, "min_size": 1, "error_buffer": 0.5}),
        (rdb.SamplesPerInsert, {"ratio": 1.0, "min_size": 1, "error_buffer": float("inf")}),
    ],
    ids=str,
)
def test_impossible_limits(kind: Any, arguments: dict[str, Any]) -> None:
    with pytest.raises(rdb.InvalidSettingsError):
        kind(**arguments)


async def test_the_error_suggests_a_known_setting(store: Store, buffer: Buffer) -> None:
    calls: list[Any] = [
        buffer.update_settings,
        functools.partial(store.buffer, "math"),
        functools.partial(store.buffer, "other"),
        BufferSettings,
    ]
    given = {f"{name[:-2]}_{name[-1]}": name for name in signature(BufferSettings).parameters}
    assert len(given) == len(fields(BufferSettings))
    for wrong, meant in (given | {"max_stale": "max_staleness"}).items():
        message = f"^unknown setting '{wrong}'; did you mean '{meant}'\\?$"
        for call in calls:
            with pytest.raises(rdb.InvalidSettingsError, match=message):
                await call(**{wrong: 3})
    for kind in (rdb.Capacity, rdb.Keep, rdb.MinSize, rdb.SamplesPerInsert, rdb.Queue):
        for name in signature(kind).parameters:
            with pytest.raises(rdb.InvalidSettingsError, match=f"did you mean '{name}'"):
                kind(**{f"{name}z": 3})
    with pytest.raises(rdb.InvalidSettingsError, match="'creat'; did you mean 'create'"):
        await calls[1](creat=False)
    with pytest.raises(rdb.InvalidSettingsError, match="'ttl'; known names: archived_payload, "):
        calls[-1](ttl=3)
    assert [info.name for info in await store.buffers()] == ["math"]


async def test_compression_needs_its_library_when_it_is_set(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    squeezed = await store.buffer("squeezed", compression="zstd")
    plain = await store.buffer("plain")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(rdb.InvalidSettingsError, match=r"replaydb\[zstd\]"):
        await store.buffer("another", compression="zstd")
    with pytest.raises(rdb.InvalidSettingsError, match="compression"):
        await plain.update_settings(compression="zstd")
    assert {info.name for info in await store.buffers()} == {"plain", "squeezed"}
    assert plain.settings.compression is None
    # The setting of another process can still be read and changed.
    again = await store.buffer("squeezed")
    assert again.settings.compression == squeezed.settings.compression == "zstd"
    await again.update_settings(compression=None)


async def test_settings_of_another_store_are_obeyed_by_the_next_put(store: Store, url: str) -> None:
    here = await store.buffer("math")
    await here.put(group(priority=3.0))
    async with Store.open(url) as second:
        there = await second.buffer("math", priority_exponent=2.0, max_staleness={"gsm8k": 1})
        await there.advance_policy(10)
    [late, fine] = await here.put([group(version=8), group(version=9, priority=4.0)])
    expired, kept = await here.get([late, fine])
    assert (expired.status, kept.status) == (rdb.GroupStatus.EXPIRED, rdb.GroupStatus.COMPLETED)
    batch = await here.sample(2, rdb.Prioritized())
    assert sorted(batch.probabilities) == pytest.approx([9 / 25, 16 / 25])


async def test_the_limit_of_each_task_is_in_its_counters(store: Store) -> None:
    buffer = await store.buffer("math", max_staleness={"gsm8k": 2})
    await buffer.put([group(), group(task="code")])
    limits = {one.task_name: one.max_staleness for one in (await buffer.stats()).tasks}
    assert limits == {"code": None, "gsm8k": 2}
    await buffer.update_settings(max_staleness=5)
    limits = {one.task_name: one.max_staleness for one in (await buffer.stats()).tasks}
    assert limits == {"code": 5, "gsm8k": 5}


async def test_a_tightened_limit_expires_at_once(store: Store) -> None:
    buffer = await store.buffer("math")
    ids = await buffer.put(
        [group(version=version, status=status)
         for version in (0, 3, 5, None) for status in ("completed", "aborted", "failed")]
    )  # fmt: skip
    await buffer.advance_policy(5)
    await buffer.update_settings(max_staleness=2)
    found = await buffer.get(ids)
    expired = [one.status is rdb.GroupStatus.EXPIRED for one in found]
    assert expired == [True, True, False] + [False] * 9
    assert found[0].status_reason
    assert found[0].staleness == 5
    await buffer.update_settings(max_staleness=None)
    assert await buffer.count(statuses="expired") == 2
    assert await buffer.count(statuses="completed") == 3


async def test_a_new_exponent_reweighs_stored_groups(store: Store) -> None:
    buffer = await store.buffer("math")
    await buffer.put([group(priority=priority) for priority in (0.0, 1.0, 2.0, 3.0)])
    for exponent, weights in ((2.0, [1, 4, 9]), (0.0, [1, 1, 1]), (1.0, [1, 2, 3])):
        await buffer.update_settings(priority_exponent=exponent)
        batch = await buffer.sample(3, rdb.Prioritized())
        chances = dict(zip(batch.ids, batch.probabilities, strict=True))
        expected = {i + 2: weight / sum(weights) for i, weight in enumerate(weights)}
        assert chances == pytest.approx(expected)


async def test_an_exponent_without_weight_for_a_stored_priority_is_refused(buffer: Buffer) -> None:
    await buffer.put([group(priority=1e-100), group(priority=2.0)])
    with pytest.raises(rdb.InvalidSettingsError, match="priority_exponent"):
        await buffer.update_settings(priority_exponent=3.0, max_staleness=1)
    assert buffer.settings == (await buffer.stats()).settings == BufferSettings()
    with pytest.raises(rdb.InvalidInputError):
        await (await _reopened(buffer)).put(group(priority=1e-100))


async def _reopened(buffer: Buffer) -> Buffer:
    """Return the buffer, with an exponent for which 1e-100 has no weight."""
    await buffer.delete(statuses="completed")
    await buffer.update_settings(priority_exponent=2.0)
    return buffer
