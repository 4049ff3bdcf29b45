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
from replaydb.domain.settings import Compression
from support import payloads
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
    segments: list[Any] = []
    path = sqlite_url.removeprefix("sqlite:///")
    exec(code, {"path": path, "group_id": group_id, "segments": segments})  # noqa: S102 - our page
    given = [one for it in several for one in it.turns or [it]]
    for (tokens, mask), one in zip(segments, given, strict=True):
        whole = np.concatenate([one.prompt_ids, one.response_ids])
        assert np.array_equal(tokens, whole)
        assert np.array_equal(mask[len(mask) - len(one.loss_mask) :], one.loss_mask)
    assert len(code.splitlines()) <= 45


@pytest.mark.parametrize("version", [1, 2])
def test_every_tensor_is_documented(version: int) -> None:
    """With payloads that have all optional tensors."""
    context = GroupContext.of("1 + 1", [1], {"image": [1]})
    several = [*sample_episodes(), conversation(), conversation()]
    if version == 2:
        first = rdb.Turn(prompt_ids=[1] * 40, response_ids=[2], token_extras={"t": range(40)})
        second = rdb.Turn(
            parent=first,
            new_ids=[3],
            response_ids=[4],
            uid="b",
            agent="main",
            state="snapshot",
            is_discarded=True,
        )
        several.append(rdb.Episode(turns=[first, second]))
        mask = [True] * 50
        several.append(rdb.Episode(prompt_ids=[1] * 48, response_ids=[2, 3], loss_mask=mask))
    other = [episode(1.0, extras={"x": [1]}, token_extras={"y": range(5)})]
    parts = [part for given in ((several, context), (other,))
             for part in codec.encode(*given, version=version)]  # fmt: skip
    names = {name for part in parts for name in read(memoryview(part.data), VERSION).tensors}
    general = {re.sub(r"^(each)/\d+/", r"\1/I/", name) for name in names}
    general = {re.sub(r"^(rows|begins|missing)/.+", r"\1/", name) for name in general}
    general = {re.sub(r"^~\d+/.+", "~1/", name) for name in general}
    general = {
        re.sub(r"^((?:each/I/)?(?:token|episode|joint|group))/.+", r"\1/NAME", one)
        for one in general
    }
    wanted = {"token/NAME", "episode/NAME", "group/NAME", "turn/token_rewards"}
    others = {"turn/parents", "turn/discarded", "joint/NAME", "missing/", "~1/"}
    assert wanted | (others if version == 2 else {"each/I/token/NAME"}) <= general
    assert [name for name in sorted(general) if f"`{name}" not in PAGE] == []


def test_the_checksum_is_as_documented() -> None:
    import xxhash

    data = bytes(payloads.encode(sample_episodes()))
    number = int.from_bytes(xxhash.xxh3_64(data, seed=0).digest(), "big", signed=True)
    assert codec.checksum_of(data) == number
