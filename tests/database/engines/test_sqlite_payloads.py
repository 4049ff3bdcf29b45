"""Reads of payloads from a SQLite file."""

from __future__ import annotations

import asyncio
import gc
import sqlite3
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from sqlalchemy import make_url

from replaydb import Episode, EpisodeGroup, Store
from replaydb.database.sqlite.session import (
    _select_small_cores,
    _select_small_fields,
    _select_small_payloads,
)
from replaydb.util.memory import LEAST_BYTES
from support.connections import transaction
from support.plans import plan_of


async def test_large_payloads_reuse_memory(sqlite_url: str) -> None:
    tokens = np.arange(LEAST_BYTES, dtype=np.int32)
    addresses = set()
    async with Store.open(sqlite_url) as store:
        buffer = await store.buffer("math")
        episode = Episode(token_ids=tokens, loss_mask=tokens >= 0)
        await buffer.put(EpisodeGroup("gsm8k", [episode]))
        gc.collect()  # memory of earlier tests
        for number in range(8):
            batch = await buffer.sample(1)
            found = batch[0].episodes[0].token_ids
            assert (found == tokens).all()
            if number >= 2:  # memory of the put may be freed during the first draws
                addresses.add(found.ctypes.data)
            del found, batch
    # The thread that decoded a batch may still refer to it when the next one is read.
    assert len(addresses) <= 2


async def test_large_payloads_are_read_while_another_process_writes(sqlite_url: str) -> None:
    """Reading a blob takes no lock of the file."""
    tokens = np.arange(LEAST_BYTES, dtype=np.int32)
    episode = Episode(token_ids=tokens, loss_mask=tokens >= 0)
    async with Store.open(sqlite_url) as store:
        buffer = await store.buffer("math")
        [one] = await buffer.put(EpisodeGroup("gsm8k", [episode]))
        with closing(sqlite3.connect(make_url(sqlite_url).database or "")) as writer:
            writer.execute("BEGIN IMMEDIATE")
            async with asyncio.timeout(60):
                [found] = await buffer.get([one])
            assert (found.episodes[0].token_ids == tokens).all()
        async with Store.open(sqlite_url, read_only=True) as reader:
            [found] = await (await reader.buffer("math")).get([one])
            assert (found.episodes[0].token_ids == tokens).all()


@pytest.mark.parametrize(
    ("statement", "index", "searched"),
    [
        (_select_small_payloads([5, 6, 7]), "pk_payload", "(group_id=?)"),
        (_select_small_cores([5, 6, 7]), "pk_payload", "(group_id=? AND part>?)"),
        (_select_small_fields([5, 6], ["a"]), "ix_payload_field", "(group_id=? AND field=?)"),
    ],
)
async def test_rows_of_payloads_are_found_by_an_index(
    sqlite_url: str, statement: Any, index: str, searched: str
) -> None:
    """Without the values of a column behind the data, for which SQLite would read the data."""
    async with transaction(sqlite_url) as connection:
        plan = await plan_of(connection, statement)
    assert plan.indexes == {index, "pk_pack"}, plan.text
    assert plan.tables == {"payload", "pack"}, plan.text
    assert searched in plan.text
