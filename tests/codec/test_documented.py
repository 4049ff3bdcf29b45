"""The payload format is as documented: the example of the page reads it without replaydb."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import replaydb as rdb
from replaydb import codec
from replaydb.codec.framing import read
from replaydb.codec.payload import VERSION
from replaydb.domain.episodes.context import GroupContext
from replaydb.domain.episodes.flat import flatten
from replaydb.domain.settings import Compression
from support.groups import conversation, episode
from support.samples import sample_episodes

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "payload.md").read_text(encoding="utf8")


@pytest.mark.parametrize("compression", [None, "zstd"])
async def test_the_example_reads_a_group(sqlite_url: str, compression: Compression | None) -> None:
    several = [*sample_episodes(), conversation(), episode(None, finish_reason="length")]
    async with rdb.Store.open(sqlite_url) as store:
        buffer = await store.buffer("math", compression=compression)
        [group_id] = await buffer.put(rdb.EpisodeGroup("math", several, prompt="1 + 1"))
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    episodes: list[dict[str, Any]] = []
    path = sqlite_url.removeprefix("sqlite:///")
    exec(code, {"path": path, "group_id": group_id, "episodes": episodes})  # noqa: S102 - our page
    for found, given in zip(episodes, several, strict=True):
        assert np.array_equal(found["token_ids"], given.token_ids)
        assert np.array_equal(found["loss_mask"], given.loss_mask)
        assert given.reward == (None if np.isnan(found["reward"]) else found["reward"])
        assert found["finish_reason"] == given.finish_reason


def test_every_tensor_is_documented() -> None:
    """With a payload that has all optional tensors."""
    context = GroupContext.of("1 + 1", [1], {"image": [1]})
    turns = [conversation(), conversation()]
    whole = codec.encode(flatten([*sample_episodes(), *turns], context))
    joined = codec.encode(flatten([episode(1.0, extras={"x": [1]}, token_extras={"y": range(5)})]))
    names = {name for data in (whole, joined) for name in read(memoryview(data), VERSION)}
    general = {re.sub(r"^(each)/\d+/", r"\1/I/", name) for name in names}
    general = {
        re.sub(r"^((?:each/I/)?(?:token|episode|group))/.+", r"\1/NAME", one) for one in general
    }
    assert {"each/I/token/NAME", "episode/NAME", "group/NAME", "turn/token_rewards"} <= general
    assert [name for name in sorted(general) if f"`{name}`" not in PAGE] == []


def test_the_checksum_is_as_documented() -> None:
    import xxhash

    data = bytes(codec.encode(flatten(sample_episodes())))
    number = int.from_bytes(xxhash.xxh3_64(data, seed=0).digest(), "big", signed=True)
    assert codec.checksum_of(data) == number
