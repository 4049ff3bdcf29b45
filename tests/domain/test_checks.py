"""One rule per kind of argument, in every call and on both engines."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import replaydb as rdb
from replaydb import Buffer, BufferSettings, Store, training
from replaydb.training import advantages, importance, priorities
from replaydb.training.dataset import ReplayDataset
from replaydb.training.prometheus import BufferCollector, StoreCollector
from support.groups import episode, group


class Boaster(int):
    """An int subclass that claims to fit everywhere."""

    def __le__(self, other: object) -> bool:
        return True

    __ge__ = __le__


#: Values that are not numbers, not whole numbers, not names.
NUMBERS: list[Any] = ["1.5", None, True, np.True_, float("nan"), -1.0, 10**400, [1.0], b"1", 1j]
INTEGERS: list[Any] = [
    "1",
    1.0,
    np.float64(1),
    True,
    np.True_,
    -1,
    2**63,
    Boaster(2**70),
    [1],
    b"1",
]
#: Not a sequence: iterating over a mapping would use its keys.
NOTHING: list[Any] = [3, np.array(3), torch.tensor(3), {}, {1: 2}, rdb.col.tags["a"] == "b"]
FLAGS: list[Any] = [None, 0, 1, "no", np.zeros(2), torch.zeros(2), rdb.col.id > 0]
TEXTS: list[Any] = [None, "a\0", "\ud800", 3, b"a"]
NAMES: list[Any] = ["", "a" * 256, *TEXTS[1:]]
SEVERAL: list[Any] = [*NOTHING, "", *([name] for name in NAMES)]
WORDS: list[Any] = ["", "x", np.zeros(2), None, *NOTHING]
TOKENS: list[Any] = [2**31, *(it for it in INTEGERS if it != -1)]
OBJECTS: list[Any] = [3, [1], {1: 2}, {"a": object()}, {"a": float("nan")}]


def turn(**changes: Any) -> rdb.Turn:
    return rdb.Turn(prompt_ids=[1], response_ids=[2], **changes)


FINITE = [it for it in NUMBERS if it != -1.0]
REWARDS = np.ones(1)
BUFFER: Any = None  # checked after the others
ONES, MASK = torch.ones(1, 1), torch.ones(1, 1, dtype=torch.bool)

GIVEN: list[tuple[str, Callable[[Any], Any], type[Exception], list[Any]]] = [
    ("weight", lambda it: rdb.Share(it), rdb.InvalidInputError, NUMBERS),
    ("shares['a']", lambda it: rdb.Mix({"a": it}), rdb.InvalidInputError, NUMBERS),
    ("minimum", lambda it: rdb.Share(1, minimum=it), rdb.InvalidInputError, INTEGERS),
    ("beta", lambda it: rdb.Prioritized(it), rdb.InvalidInputError, NUMBERS),
    ("priority", lambda it: group(priority=it), rdb.InvalidInputError, NUMBERS),
    ("uid", lambda it: turn(uid=it), rdb.InvalidInputError, NAMES),
    ("agent", lambda it: turn(agent=it), rdb.InvalidInputError, NAMES),
    ("state", lambda it: turn(state=it), rdb.InvalidInputError, TEXTS[1:]),
    ("is_discarded", lambda it: turn(is_discarded=it), rdb.InvalidInputError, FLAGS),
    ("Capacity.groups", lambda it: rdb.Capacity(groups=it), rdb.InvalidSettingsError, INTEGERS),
    ("Keep.count", lambda it: rdb.Keep(count=it), rdb.InvalidSettingsError, INTEGERS),
    ("MinSize.size", lambda it: rdb.MinSize(it), rdb.InvalidSettingsError, INTEGERS),
    ("Queue.size", lambda it: rdb.Queue(it), rdb.InvalidSettingsError, INTEGERS),
    (
        "SamplesPerInsert.ratio",
        lambda it: rdb.SamplesPerInsert(it, 1, 9.0),
        rdb.InvalidSettingsError,
        NUMBERS,
    ),
    (
        "max_staleness",
        lambda it: BufferSettings(max_staleness=it),
        rdb.InvalidSettingsError,
        INTEGERS,
    ),
    (
        "priority_exponent",
        lambda it: BufferSettings(priority_exponent=it),
        rdb.InvalidSettingsError,
        NUMBERS,
    ),
    (
        "time_to_live",
        lambda it: BufferSettings(time_to_live=it),
        rdb.InvalidSettingsError,
        [it for it in NUMBERS if it is not None],
    ),
    ("tasks", lambda it: rdb.Share(1, tasks=it), rdb.InvalidInputError, SEVERAL),
    *(
        (field, give, rdb.InvalidInputError, FINITE)
        for field, give in {
            "tolerance": lambda it: advantages.rloo(REWARDS, [0], tolerance=it),
            "solved": lambda it: priorities.Learnability(it),
            "decay": lambda it: priorities.LinearDecay(it),
        }.items()
    ),
    *(
        (field, give, rdb.InvalidInputError, NUMBERS)
        for field, give in {
            "eps": lambda it: advantages.grpo(REWARDS, [0], eps=it),
            "discount": lambda it: training.gae(ONES, ONES, MASK, discount=it),
            "max_age": lambda it: BufferCollector(BUFFER, max_age=it),
            "cap": lambda it: importance.truncated(ONES, it),
            "low": lambda it: importance.clipped(ONES, it),
            "eta": lambda it: priorities.td_errors(ONES, MASK, [0], 1, eta=it),
        }.items()
    ),
    ("draws", lambda it: BufferCollector(BUFFER, draws=it), rdb.InvalidInputError, INTEGERS),
    ("draws", lambda it: StoreCollector(BUFFER, draws=it), rdb.InvalidInputError, INTEGERS),
    ("max_age", lambda it: StoreCollector(BUFFER, max_age=it), rdb.InvalidInputError, NUMBERS),
    ("buffers", lambda it: StoreCollector(BUFFER, it), rdb.InvalidInputError, SEVERAL),
    ("n", lambda it: rdb.Mix({"a": 1}).quotas(it), rdb.InvalidInputError, INTEGERS),
    (
        "k",
        lambda it: advantages.pass_at_k(REWARDS, [0], it),
        rdb.InvalidInputError,
        [0, *INTEGERS],
    ),
    ("std", lambda it: advantages.grpo(REWARDS, [0], std=it), rdb.InvalidInputError, WORDS),
]


@pytest.mark.parametrize(
    ("field", "give", "error", "wrong"), GIVEN, ids=[field for field, *_ in GIVEN]
)
def test_values_of_another_kind_are_refused(
    field: str, give: Callable[[Any], Any], error: type[Exception], wrong: list[Any]
) -> None:
    for it in wrong:
        with pytest.raises(error) as caught:
            give(it)
        assert str(caught.value).startswith(f"{field}: expected "), it


#: Invalid values by the name of the argument, or of the call and the argument.
EXTRAS: list[Any] = [
    3,
    [1],
    {"a": "text"},
    {"a": [[1], [2, 3]]},
    *({name: [1]} for name in NAMES),
]

#: Numbers in the range of float32; bools are 1.0 and 0.0 for rewards.
NUMBERS_32: list[Any] = ["1.5", float("nan"), 10**400, 1e39, [1.0], b"1", 1j]

WRONG: dict[str, list[Any]] = {
    "above": INTEGERS,
    "advance_policy": [2**31, *INTEGERS],
    "advantage": NUMBERS_32,
    "advantages": ["text", 3, [[1.0]], [math.inf], [1.0, 2.0]],
    "after": [3, "last"],
    "at_least": [-1, *INTEGERS],
    "attention_mask": ["text", [1, 1]],
    "batch_size": [0, *INTEGERS],
    "before": INTEGERS,
    "below": INTEGERS,
    "buffer": NAMES,
    "claim_uid": NAMES,
    "collate": [3, "list"],
    "create": FLAGS,
    "cursor": [3, [1], {"a": None}, *OBJECTS[3:], *({name: 1} for name in NAMES)],
    "deadline": [0, 1e11, *NUMBERS],
    "device": [],  # torch checks it
    "draw_id": INTEGERS,
    "draws": [0, *INTEGERS],
    "drop_oversized": FLAGS,
    "dry_run": FLAGS,
    "durability": WORDS,
    "end_token_id": TOKENS,
    "episode": [None, 3, rdb.Episode, "text"],
    "episode_extras": EXTRAS,
    "even": FLAGS,
    "extras": EXTRAS,
    "expected_episodes": [0, 2**31, *INTEGERS],
    "expired": FLAGS,
    "fields": [[3], *NOTHING],
    "fewer_than": [0, *INTEGERS],
    "finish_reasons": ["s", 3, [3], ["stop"] * 2],
    "first_step": INTEGERS,
    "fit": WORDS,
    "group_id": INTEGERS,
    "group_uid": NAMES,
    "informative": [3, "reward_std"],
    "groups": [[3], "text", *NOTHING],
    "ids": [*NOTHING, "12", b"5", bytearray(b"5"), *([one] for one in INTEGERS)],
    "lease": FLAGS,
    "lease_id": INTEGERS,
    "lengths": ["text", [1.0], [3], [-1]],
    "limit": INTEGERS,
    "lineage": [*NAMES, np.zeros(2)],
    "load": FLAGS,
    "logprobs": ["text", [0.0] * 3, 1],
    "loss_mask": ["text", [0, 2], [0.0, 1.0]],
    "max_length": [0, *INTEGERS],
    "max_prompt_length": [0, *INTEGERS],
    "max_staleness": INTEGERS,
    "metadata": [3, "text", [{}, {}], *([it] for it in OBJECTS)],
    "max_tokens": [0, *INTEGERS],
    "migrate": FLAGS[1:],
    "min_age": [7199, *NUMBERS],
    "min_episodes": [0, *INTEGERS],
    "n": [{"a": -1}, {"": 1}, {3: 1}, *INTEGERS],
    "name": NAMES,
    "num_steps": INTEGERS,
    "on_duplicate": WORDS,
    "order_by": [
        3,
        "id",
        rdb.col.task_name,
        rdb.col.tags,
        rdb.col.tags["level"],
        rdb.col.has_transcript,
        -rdb.col.priority,
        rdb.col.priority.desc().nulls_first(),
        rdb.col.id + 1,
    ],
    "other": [None, np.array(3), torch.tensor(3), {}, Buffer],
    "owner": NAMES,
    "pad_to_multiple_of": [0, *INTEGERS],
    "pad_token_id": TOKENS,
    "policy": [None, "fifo", rdb.Fifo, rdb.Share(1)],
    "payload_cache": INTEGERS,
    "payload_grace": [0, 1e11, *NUMBERS],
    "payloads": ["", "mysql://here", "packs", *TEXTS[1:]],
    "policy_versions": ["text", 2**31, 0.5, [1, 2], True],
    "pool_size": [0, *INTEGERS],
    "position": INTEGERS,
    "prefetch": INTEGERS,
    "priorities": [
        [],
        [1.0, 2.0],
        [[1.0, 2.0]],
        [[1.0], [2.0, 3.0]],
        np.ones((1, 1)),
        [float("inf")],
        *NOTHING,
        *([one] for one in NUMBERS),
    ],
    "priority": NUMBERS,
    "progress": [3, "print"],
    "prompt": [3, b"1 + 1", {"role": "user"}, ["user"], [None], *([it] for it in OBJECTS)],
    "prompt_ids": [3, "text", [1.5], [[1]], [2**31]],
    "prompt_lengths": ["text", [3], [-1], [1, 1]],
    "prompt_side": WORDS,
    "prompt_uid": NAMES,
    "rank": [1, *INTEGERS],
    "read_only": FLAGS,
    "reason": TEXTS,
    "rewards": ["text", 3, [[1.0]], [1e39], [1.0, 2.0]],
    "rewind": FLAGS,
    "run": [*NAMES, np.zeros(2)],
    "run_metadata": OBJECTS,
    "runs": SEVERAL,
    "settings": [{}, {"seed": 1}, BufferSettings, 3],
    "shard": WORDS,
    "side": WORDS,
    "state": [None, 3, {}, {"step": "1", "draws": []}, {"step": 1, "draws": ["1"]}],
    "status": WORDS,
    "statuses": [["gone"], "gone", [3], *NOTHING],
    "step": INTEGERS,
    "take_over": FLAGS,
    "tags": OBJECTS,
    "task_name": NAMES,
    "tasks": SEVERAL,
    "texts": ["s", 3, [3], ["a"] * 2],
    "timeout": [one for one in NUMBERS if one is not None],
    "token_extras": EXTRAS,
    "token_ids": ["text", 3, [0.5, 0.5], [2**31, 1], [[[1]]]],
    "token_versions": ["text", [0.5, 0.5], [1, 2, 3]],
    "tolerance": NUMBERS,
    "ttl": [0, 1e11, float("inf"), *NUMBERS],
    "totals": FLAGS,
    "uids": SEVERAL,
    "url": [None, 3, "", "mysql://here"],
    "version": [2**31, *INTEGERS],
    "where": [3, "status", [1], {}, rdb.col],
    "world_size": [0, *INTEGERS],
    "discarded": [3, [3], "", [""]],
    "finish_reason": TEXTS,
    "parent_uid": NAMES,
    "missing": [*WORDS, "metadata."],
    "annotations": [None, 3, [3], rdb.Annotation],
    "author": NAMES,
    "policy_version": [2**31, *INTEGERS],
    "if_match": [3, [1], {"group-0": 1}, {1: "etag"}, *OBJECTS[3:]],
    "reward": NUMBERS_32,
    "text": [3, b"a"],
    "turn": [None, 3, "text", rdb.Turn],
    "whole_groups": FLAGS,
}


def wrong(argument: inspect.Parameter) -> list[Any]:
    """Return invalid values. None is invalid unless the signature allows it."""
    others = [it for it in WRONG[argument.name] if it is not None]
    return others if "None" in argument.annotation else [None, *others]


async def test_every_argument_of_every_call_is_checked(
    store: Store, buffer: Buffer, url: str
) -> None:
    """Before anything is written."""
    [one, two] = await buffer.put([group(), group()])
    lease = await buffer.lease(1, rdb.Lifo(), ttl=60)
    calls: dict[str, dict[str, Any]] = {
        "Batch.packed": {"pad_token_id": 0, "max_tokens": 9},
        "Batch.padded": {"pad_token_id": 0},
        "Batch.split": {"pad_token_id": 0},
        "Batch.trees": {"pad_token_id": 0},
        "Buffer.ack": {"lease_id": lease.id},
        "Buffer.add_episode": {"group_uid": "open", "episode": episode()},
        "Buffer.admission": {"batch_size": 1, "max_staleness": 0},
        "Buffer.advance_policy": {"version": 0},
        "Buffer.annotate": {"annotations": rdb.Annotation("group-0", 0, reward=1.0)},
        "Buffer.append_turn": {"group_uid": "open", "position": 0, "turn": turn(uid="call-1")},
        "Buffer.claim": {"ttl": 60, "timeout": 0},
        "Buffer.copy_to": {"other": await store.buffer("other")},
        "Buffer.count": {},
        "Buffer.cursor": {"name": "data"},
        "Buffer.delete": {},
        "Buffer.draws": {},
        "Buffer.episodes": {"group_id": one},
        "Buffer.fail_episode": {"group_uid": "open", "position": 0, "reason": "timeout"},
        "Buffer.find": {},
        "Buffer.finish_episode": {"group_uid": "open", "position": 0},
        "Buffer.get": {"ids": [one]},
        "Buffer.lease": {"n": 1, "ttl": 60},
        "Buffer.leases": {},
        "Buffer.loader": {"batch_size": 1},
        "Buffer.metrics": {},
        "Buffer.open_group": {"task_name": "a", "group_uid": "b", "expected_episodes": 2},
        "Buffer.open_lease": {"lease_id": lease.id, "ttl": 60},
        "Buffer.peek": {"n": 1},
        "Buffer.prompts": {},
        "Buffer.put": {"groups": group()},
        "Buffer.read_lease": {"lease_id": lease.id},
        "Buffer.redraw": {"draw_id": 1},
        "Buffer.release_claim": {"claim_uid": "a", "reason": "killed"},
        "Buffer.revoke": {"lease_id": lease.id},
        "Buffer.sample": {"n": 1},
        "Buffer.stats": {},
        "Buffer.steps": {},
        "Buffer.texts": {"ids": [one]},
        "Buffer.trajectories": {},
        "Buffer.turns": {"group_uid": "open", "position": 0},
        "Buffer.update": {"ids": [one, two], "status": "filtered"},
        "Buffer.update_priorities": {"ids": [one], "priorities": [2.0]},
        "Buffer.update_settings": {},
        "Buffer.wait_until": {"at_least": 1, "timeout": 0},
        "Lease.ack": {},
        "Lease.extend": {},
        "Lease.fail": {"ids": [one], "reason": "unreadable"},
        "Lease.nack": {},
        "Lease.reject": {"reason": "useless"},
        "Lease.shard": {"rank": 0, "world_size": 1},
        "Lease.shards": {"world_size": 1},
        "Loader.load_state_dict": {},
        "Store.buffer": {"name": "new"},
        "Store.close": {},
        "Store.open": {"url": url},
        "Store.prune": {},
        "Store.relocate_payloads": {"payloads": "file:///payloads"},
        "Store.run_stats": {"run": "test"},
        "StoredGroup.from_arrays": {
            "task_name": "a",
            "token_ids": [1, 2],
            "lengths": [2],
            "loss_mask": [0, 1],
        },
        "StoredGroup.without_stale_episodes": {},
    }
    owners = [store, buffer, lease, lease.batch, lease.batch.groups[0], buffer.loader(1)]
    known = {call for owner in owners for call in public_calls(owner)} - {"Buffer.saw"}
    assert known == calls.keys()
    for owner in owners:
        for call in public_calls(owner).keys() & calls.keys():
            method = public_calls(owner)[call]
            for argument in arguments(method):
                for it in wrong(argument):
                    with pytest.raises(rdb.InvalidInputError) as caught:
                        await done(method(**calls[call] | {argument.name: it}))
                    assert caught.value.field.startswith(argument.name), (call, argument, it)
    [stored] = await buffer.get([one])
    assert (stored.priority, stored.times_sampled) == (1.0, 0)
    assert await buffer.count() == 2
    assert {info.name: info.num_groups for info in await store.buffers()} == {"math": 2, "other": 0}
    await lease.ack()


def test_a_dataset_is_refused_before_there_are_workers(url: str) -> None:
    valid: dict[str, Any] = {"url": url, "buffer": "math", "batch_size": 1}
    for argument in arguments(ReplayDataset):
        if argument.name in ("url", "rank", "world_size"):
            continue
        for it in wrong(argument):
            with pytest.raises(rdb.InvalidInputError) as caught:
                ReplayDataset(**valid | {argument.name: it})
            assert caught.value.field.startswith(argument.name), (argument, it)


async def test_nothing_is_stored_when_the_draw_that_follows_would_be_refused(
    buffer: Buffer,
) -> None:
    given: dict[str, Any] = {"groups": [group()], "buffer": buffer}
    for argument in arguments(training.replace_uninformative):
        for it in wrong(argument) if argument.name != "buffer" else ():
            with pytest.raises(rdb.InvalidInputError) as caught:
                await training.replace_uninformative(**given | {argument.name: it})
            assert caught.value.field.startswith(argument.name), (argument, it)
    assert await buffer.count() == 0


def public_calls(owner: object) -> dict[str, Callable[..., Any]]:
    """Return methods with arguments, by class and method name."""
    kind = type(owner)
    found = {name: getattr(owner, name) for name in dir(kind) if not name.startswith("_")}
    return {
        f"{kind.__name__}.{name}": method
        for name, method in found.items()
        if inspect.isroutine(method) and arguments(method)
    }


def arguments(method: Callable[..., Any]) -> list[inspect.Parameter]:
    parameters = inspect.signature(method).parameters.values()
    return [it for it in parameters if it.kind is not inspect.Parameter.VAR_KEYWORD]


async def done(result: Any) -> None:
    if inspect.isawaitable(result):
        await result


async def test_the_error_names_objects_that_are_not_groups(buffer: Buffer) -> None:
    cases: list[tuple[Any, str, str]] = [
        ({"task_name": "gsm8k"}, "groups", "dict"),
        ("gsm8k", "groups", "str"),
        (None, "groups", "None"),
        (rdb.EpisodeGroup, "groups", "<class 'replaydb.EpisodeGroup'>"),
        (episode(), "groups", "Episode"),
        ([episode()], "groups[0]", "Episode"),
        ([group(), {"task_name": "gsm8k"}], "groups[1]", "dict"),
        ([[group()]], "groups[0]", "list"),
    ]
    for wrong, field, actual in cases:
        with pytest.raises(rdb.InvalidInputError) as caught:
            await buffer.put(wrong)
        assert (caught.value.field, caught.value.actual) == (field, actual)
        assert "EpisodeGroup" in caught.value.expected


async def test_names_from_an_iterator_are_read_once(buffer: Buffer) -> None:
    await buffer.put(group())
    mix = rdb.Mix([rdb.Share(1, tasks=iter(["gsm8k"]))])
    loader = buffer.loader(1, tasks=iter(["gsm8k"]), prefetch=0, timeout=0)
    for _ in range(2):
        assert len(await buffer.sample(1, mix)) == len(await anext(loader)) == 1


async def test_scalars_of_numpy_are_numbers(store: Store, url: str) -> None:
    """They are stored as JSON and passed to drivers that do not know them."""
    scalar: Any = np
    buffer = await store.buffer(
        "math",
        max_staleness={"gsm8k": scalar.int64(3)},
        priority_exponent=scalar.float32(0.5),
        seed=scalar.uint32(7),
        capacity=rdb.Capacity(groups=scalar.int64(5)),
        time_to_live=scalar.float64(600),
        max_attempts=scalar.int8(3),
        rate_limit=rdb.SamplesPerInsert(scalar.float32(2), scalar.int64(1), scalar.float64(40)),
        record_draws=scalar.True_,
    )
    async with Store.open(url) as other:
        assert (await other.buffer("math")).settings == buffer.settings
    tags = {"n": scalar.int64(3), "x": scalar.float32(0.5), "ok": scalar.True_}
    [one] = await buffer.put(
        group(tags=tags, version=0), priority=scalar.float32(2), cursor={"data": scalar.int64(4)}
    )
    assert await buffer.cursor("data") == 4
    mix = rdb.Mix({"gsm8k": scalar.float32(1)})
    batch = await buffer.sample(
        scalar.int64(1),
        mix,
        timeout=scalar.float32(0),
        step=scalar.int16(3),
        max_staleness=scalar.int64(3),
    )
    assert batch.groups[0].tags == {"n": 3, "x": 0.5, "ok": True}
    assert await buffer.update_priorities(np.array([one]), np.array([4], scalar.float32)) == 1
    async with buffer.lease(1, ttl=scalar.float64(60)) as lease:
        assert lease.batch.groups[0].priority == 4.0


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (np.bool_(True), True),
        (np.array(False), False),
        (np.uint64(2**63), 2**63),
        (np.float32(0.5), 0.5),
        (np.longdouble(0.5), 0.5),
        ([np.int8(1), {"a": np.float16(2)}], [1, {"a": 2.0}]),
    ],
)
def test_scalars_of_numpy_are_json(value: Any, plain: Any) -> None:
    found = rdb.EpisodeGroup("t", [], status="failed", tags={"a": value}).tags["a"]
    assert json.dumps(found) == json.dumps(plain)


@pytest.mark.parametrize("value", [np.clongdouble(1), np.datetime64("2020"), np.arange(2)])
def test_numpy_values_that_are_not_json(value: Any) -> None:
    with pytest.raises(rdb.InvalidInputError, match=r"tags\.a: expected JSON values"):
        rdb.EpisodeGroup("t", [], status="failed", tags={"a": value})


def test_calls_that_wait_have_the_default_of_their_kind() -> None:
    """As in the table of docs/lifecycle.md."""
    calls: dict[str, Callable[..., Any]] = {
        name: call
        for owner in (Buffer, Store)
        for name, call in inspect.getmembers(owner, inspect.isfunction)
        if not name.startswith("_")
    }
    calls["ReplayDataset"] = ReplayDataset
    found = {
        name: parameters["timeout"].default
        for name, call in calls.items()
        if "timeout" in (parameters := inspect.signature(call).parameters)
    }
    at_once = dict.fromkeys(["lease", "peek", "sample"], 0)
    backpressure = dict.fromkeys(
        [
            *("add_episode", "admission", "claim", "fail_episode", "finish_episode", "open_group"),
            *("put", "wait_until"),
        ]
    )
    loops = dict.fromkeys(["ReplayDataset", "loader"])
    assert found == at_once | backpressure | loops | {"close": 60}


@pytest.mark.parametrize(("wrong", "bounds"), [(-1, ">= 0"), (2**63, f"from 0 to {2**63 - 1}")])
def test_an_error_names_the_bound_that_was_crossed(wrong: int, bounds: str) -> None:
    with pytest.raises(rdb.InvalidSettingsError, match=f"an integer {bounds}, got"):
        BufferSettings(seed=wrong)
