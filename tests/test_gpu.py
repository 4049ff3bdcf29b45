"""Batches, loaders and losses on a CUDA device."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from replaydb import Batch, Buffer, Episode, EpisodeGroup, Fifo, blocking
from replaydb.batch import PaddedBatch
from replaydb.training import advantages, critics, importance
from replaydb.training.dataset import ReplayDataset
from support.batches import batch_of
from support.groups import groups

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

LAYOUTS: dict[str, Callable[..., Any]] = {
    "padded": partial(Batch.padded, pad_token_id=0),
    "padded left with token 9": partial(Batch.padded, pad_token_id=9, side="left"),
    "split": partial(Batch.split, pad_token_id=0),
    "packed": partial(Batch.packed, pad_token_id=0, max_tokens=64),
    "packed, first fit": partial(Batch.packed, pad_token_id=0, max_tokens=64, fit="first"),
}
#: Clock cycles of a GPU that take some tenths of a second.
BUSY = 1_000_000_000


def one_group(num_episodes: int = 5, num_tokens: int = 24, first: int = 0) -> list[Episode]:
    """Return episodes of different lengths with extras of many dtypes."""
    return [
        Episode(
            prompt_ids=range(first, first + 3 + i),
            response_ids=range(first + 100, first + 100 + num_tokens - 2 * i),
            logprobs=None if i == 1 else torch.linspace(-3, 0, num_tokens - 2 * i),
            reward=None if i == 2 else i / 4,
            policy_version=i,
            token_extras={
                "value": torch.arange(num_tokens + 3 - i).to(torch.bfloat16),
                "small": torch.arange(num_tokens + 3 - i).to(torch.float8_e4m3fn),
                "experts": torch.arange(6 * (num_tokens + 3 - i)).to(torch.uint8).view(-1, 2, 3),
            },
            extras={"vector": torch.full((4,), float(i)), "ragged": torch.arange(i)},
        )
        for i in range(num_episodes)
    ]


def some_batch() -> Batch:
    return batch_of([one_group(), one_group(3, 40), [Episode(prompt_ids=[7], response_ids=[8])]])


def tensors(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all tensors of a batch, with names."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from tensors(one, f"{name}.{key}")
    elif isinstance(value, list):
        for i, one in enumerate(value):
            yield from tensors(one, f"{name}[{i}]")
    elif hasattr(value, "merged"):
        for field in fields(value):
            yield from tensors(getattr(value, field.name), field.name)


def assert_same(found: Any, expected: Any) -> None:
    """Check that all tensors are on the GPU and have the values of those on the CPU."""
    on_gpu, on_cpu = dict(tensors(found)), dict(tensors(expected))
    assert on_gpu.keys() == on_cpu.keys()
    assert len(on_gpu) > 10
    for name, one in on_gpu.items():
        assert one.device.type == "cuda", name
        assert one.dtype == on_cpu[name].dtype, name
        same = (one.cpu().double(), on_cpu[name].double())  # of float8, too
        torch.testing.assert_close(*same, rtol=0, atol=0, equal_nan=True, msg=name)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("cuda")])
def test_values_equal_those_on_the_cpu(layout: str, device: torch.device | str) -> None:
    batch = some_batch()
    make = LAYOUTS[layout]
    assert_same(make(batch, device=device), make(batch))
    assert_same(make(batch).to(device), make(batch))
    pinned = make(batch).pin_memory()
    assert all(one.is_pinned() for _, one in tensors(pinned) if one.numel())
    assert_same(pinned.to(device, non_blocking=True), make(batch))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_copies_do_not_wait_for_the_gpu(layout: str) -> None:
    """The CPU prepares a batch while the GPU is busy with the step before.

    Only copies of more than 64 KB from other memory than page-locked would wait.
    """
    long = Episode(prompt_ids=range(200_000), response_ids=range(100_000))
    batch, make = batch_of([[long] * 4, [long] * 4]), LAYOUTS[layout]
    limits = {"max_tokens": 600_000} if layout.startswith("packed") else {}
    for _ in range(3):  # the first calls allocate memory, which waits
        kept = [make(batch, device="cuda", **limits) for _ in range(2)]
    torch.cuda.synchronize()
    del kept
    torch.cuda._sleep(BUSY)
    step = torch.cuda.current_stream().record_event()
    made = make(batch, device="cuda", **limits)
    assert not step.query()
    assert_same(made, make(batch, **limits))
    assert step.query()


def test_memory_is_not_reused_before_it_was_copied() -> None:
    """Page-locked memory of a batch is free when Python drops it, but its copy may be queued."""
    batches = [batch_of([one_group(first=1000 * i)]) for i in range(20)]
    batches[0].padded(0, device="cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(BUSY)
    made = [batch.padded(0, device="cuda") for batch in batches]
    for found, batch in zip(made, batches, strict=True):
        assert_same(found, batch.padded(0))


async def test_collate_runs_on_the_stream_where_the_loader_was_created(buffer: Buffer) -> None:
    await buffer.put(groups(4))
    stream, threads = torch.cuda.Stream(), []

    def collate(batch: Batch) -> tuple[torch.cuda.Stream, PaddedBatch]:
        threads.append(threading.get_ident())
        return torch.cuda.current_stream(), batch.padded(0, device="cuda")

    expected = (await buffer.sample(4, Fifo())).padded(0)
    with torch.cuda.stream(stream):
        async with buffer.loader(4, Fifo(), collate=collate, num_steps=3) as loader:
            torch.cuda._sleep(BUSY)
            async for used, made in loader:
                assert used == stream
                assert_same(made, expected)
    assert threading.get_ident() not in threads
    assert len(threads) == 3
    assert await asyncio.to_thread(torch.cuda.current_stream) != stream


def test_a_blocking_loader_collates_on_the_stream_of_its_trainer(url: str) -> None:
    stream = torch.cuda.Stream()
    with blocking.Store.open(url) as store, torch.cuda.stream(stream):
        buffer = store.buffer("math")
        buffer.put(groups(4))
        collate = lambda _: torch.cuda.current_stream()  # noqa: E731
        with buffer.loader(4, Fifo(), collate=collate, num_steps=2) as loader:
            assert list(loader) == [stream] * 2


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_data_loader_pins_batches(url: str, num_workers: int) -> None:
    with blocking.Store.open(url) as store:
        buffer = store.buffer("math")
        buffer.put(groups(4))
        expected = buffer.sample(4, Fifo()).padded(0)
    dataset = ReplayDataset(
        url=url,
        buffer="math",
        batch_size=4,
        shard="modulo",
        collate=partial(Batch.padded, pad_token_id=0),
        num_steps=2,
    )
    loader = DataLoader(dataset, batch_size=None, num_workers=num_workers, pin_memory=True)
    made = list(loader)
    assert len(made) == 2
    for batch in made:
        assert all(one.is_pinned() for _, one in tensors(batch) if one.numel())
        assert_same(batch.to("cuda", non_blocking=True), expected)


async def test_groups_from_tensors_on_the_gpu(buffer: Buffer) -> None:
    def made(device: str) -> list[EpisodeGroup]:
        ids = torch.arange(12, device=device).view(2, 6)
        mask = torch.ones(2, 6, dtype=torch.bool, device=device)
        logprobs = torch.linspace(-1, 0, 6, device=device)
        values = torch.arange(12, device=device).view(2, 6).to(torch.bfloat16)
        rewards = torch.tensor([1.0, 0.0], device=device)
        lengths = torch.tensor([2, 3], device=device)
        return [
            EpisodeGroup.from_arrays(
                "math",
                token_ids=ids,
                attention_mask=mask,
                prompt_lengths=lengths,
                logprobs=torch.stack([logprobs, logprobs]),
                rewards=rewards,
                token_extras={"value": values},
            ),
            EpisodeGroup(
                "math",
                [
                    Episode(
                        prompt_ids=ids[i, :2],
                        response_ids=ids[i, 2:],
                        logprobs=logprobs[2:],
                        reward=float(rewards[i]),
                        token_extras={"value": values[i]},
                    )
                    for i in range(2)
                ],
            ),
        ]

    await buffer.put([*made("cuda"), *made("cpu")])
    batch = await buffer.sample(4, Fifo())
    for i in range(2):
        found, expected = batch[i : i + 1].padded(0, device="cuda"), batch[i + 2 : i + 3].padded(0)
        assert_same(replace(found, group_ids=expected.group_ids.cuda()), expected)


def test_losses_equal_those_on_the_cpu() -> None:
    """Each function is computed on the device of its arguments."""

    groups_with_logprobs = [
        [one for one in one_group(*sizes) if one.logprobs is not None]
        for sizes in [(5, 24), (3, 40)]
    ]

    def computed(device: str) -> dict[str, torch.Tensor]:
        batch = batch_of(groups_with_logprobs).padded(0, device=device)
        rewards, index, mask = batch.rewards, batch.group_index, batch.loss_mask
        assert batch.logprobs is not None
        noise = torch.sin(torch.arange(mask.numel(), dtype=torch.float32)).view(mask.shape)
        new, old = batch.logprobs + noise.to(device), batch.logprobs
        dense = critics.terminal_rewards(rewards, mask)
        gains, returns = critics.gae(dense, new, mask, discount=0.9, decay=0.8)
        ratios = importance.token_ratios(new, old, mask)
        statistics = importance.off_policyness(new, old, mask)
        return {
            "grpo": advantages.grpo(rewards, index),
            "dr_grpo": advantages.dr_grpo(rewards, index),
            "rloo": advantages.rloo(rewards, index),
            "pass_at_k": advantages.pass_at_k(rewards, index, 2),
            "batch_normalised": advantages.batch_normalised(rewards, index),
            "terminal rewards": dense,
            "gae": gains,
            "returns": returns,
            "token ratios": ratios,
            "sequence ratios": importance.sequence_ratios(new, old, mask),
            "truncated": importance.truncated(ratios),
            "clipped": importance.clipped(ratios),
            "fresh tokens": importance.fresh_tokens(batch, 4, 2),
            "labels": batch.labels,
            "positions": batch.position_ids,
            "per token": batch.per_token(rewards),
            "off-policyness": torch.tensor(list(statistics.values()), device=device),
        }

    on_gpu, on_cpu = computed("cuda"), computed("cpu")
    for name, found in on_gpu.items():
        assert found.device.type == "cuda", name
        torch.testing.assert_close(found.cpu(), on_cpu[name], equal_nan=True, msg=name)
