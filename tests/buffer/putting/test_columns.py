"""Large columns are parts of their own: put, added, rewritten, copied, and damaged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import select, update

import replaydb as rdb
from replaydb import Episode, EpisodeGroup, Ragged, Store, Turn
from replaydb.database import migrations
from replaydb.database.tables.schema import payload
from replaydb.exchange import export_groups, import_groups
from replaydb.operations import copy, verify
from support.connections import transaction
from support.invariants import check_invariants

LAYOUTS = pytest.mark.parametrize("layout", ["inside", "outside"])


def heavy(seed: int) -> Episode:
    """Return an episode with a column of 80 KB and an extra of 80 KB."""
    rng = np.random.default_rng(seed)
    return Episode(
        prompt_ids=range(40),
        response_ids=rng.integers(0, 2**20, 60),
        reward=float(seed),
        token_extras={"top": rng.standard_normal((100, 200)).astype(np.float32)},
        extras={"image": rng.integers(0, 255, 80_000, np.uint8)},
    )


async def parts(url: str) -> list[Any]:
    async with transaction(url) as connection:
        columns = (payload.c.part, payload.c.field, payload.c.of_part)
        return [tuple(row) for row in await connection.execute(select(*columns).order_by(*columns))]


@LAYOUTS
async def test_columns_of_a_put_and_of_added_episodes(
    store: Store, url: str, layout: str, tmp_path: Path
) -> None:
    buffer = await store.buffer("math")
    whole = EpisodeGroup("gsm8k", [heavy(0), heavy(1)], group_uid="whole")
    await buffer.put(whole)
    assert await parts(url) == [
        (-3, "image", 0), (-2, "top", 0), (0, None, None),
    ]  # fmt: skip
    await buffer.open_group("gsm8k", "open", 3, prompt="?")
    for position in (2, 0, 1):
        await buffer.add_episode("open", heavy(position), position=position)
    [found, added] = await buffer.get(uids=["whole", "open"])
    assert found.episodes == whole.episodes
    assert added.episodes == (heavy(0), heavy(1), heavy(2))
    assert {one for one, field, _ in await parts(url) if field} == {*range(-7, -1)}
    padded = (await buffer.sample(2)).padded(0)
    assert padded.token_extras["top"].shape == (5, 100, 200)
    assert (await verify(store)).is_sound
    await check_invariants(url)
    target = f"sqlite:///{tmp_path / 'copy.db'}"
    await copy(url, target)
    async with Store.open(target) as other:
        [copied] = await (await other.buffer("math")).get(uids=["open"])
        assert copied.episodes == added.episodes


@LAYOUTS
async def test_ragged_columns(store: Store, url: str, layout: str, tmp_path: Path) -> None:
    """A large and a small one, of turns that share tokens, of all their tokens, and of a row."""
    rng = np.random.default_rng(0)
    counts = rng.integers(0, 200, 310)
    values = rng.integers(0, 150_000, counts.sum()).astype(np.int32)
    own = Ragged(values, counts)
    first = Turn(prompt_ids=range(250), response_ids=range(50), token_extras={"mask": own[:300]})
    second = Turn(parent=first, new_ids=range(5), response_ids=range(5), token_extras={"mask": own})
    joint = Ragged([1, 2], [0, 2, *[0] * 608])
    given = EpisodeGroup(
        "gsm8k",
        [
            Episode(turns=[first, second], token_extras={"joint": joint}),
            Episode(prompt_ids=[1], response_ids=[2, 3], token_extras={"mask": own[:2]}),
        ],
        group_uid="whole",
    )
    buffer = await store.buffer("math")
    await buffer.put(given)
    await buffer.open_group("gsm8k", "open", 2)
    for position in (1, 0):
        await buffer.add_episode("open", given.episodes[position], position=position)
    assert [one for one in await parts(url) if one[1:] == ("mask", 0)] == [(-2, "mask", 0)] * 2
    [info] = await buffer.find(uids="whole")
    assert info.num_bytes < values.nbytes + 10_000  # those of shared tokens once
    for one in await buffer.get(uids=["whole", "open"]):
        assert one.episodes == given.episodes
    drawn = await buffer.sample(2)
    assert drawn.draw_id is not None
    again = await buffer.redraw(drawn.draw_id, fields=["mask"])
    x, y = (batch.padded(0).token_extras["mask"] for batch in (drawn, again))
    assert x.values.tolist() == y.values.tolist() == [*values, *own[:2].values] * 2
    assert x.offsets.tolist() == y.offsets.tolist()
    assert (await buffer.redraw(drawn.draw_id, fields=["joint"])).padded(0).token_extras.keys() == {
        "joint"
    }
    assert (await verify(store)).is_sound
    await check_invariants(url)
    await copy(url, f"sqlite:///{tmp_path / 'copy.db'}")
    export_groups(url, tmp_path / "export")
    async with Store.open(f"sqlite:///{tmp_path / 'imported.db'}"):
        import_groups(f"sqlite:///{tmp_path / 'imported.db'}", tmp_path / "export", create=True)
    for name in ("copy", "imported"):
        async with Store.open(f"sqlite:///{tmp_path / name}.db") as other:
            found = await (await other.buffer("math")).get(uids=["whole", "open"])
            assert [one.episodes for one in found] == [given.episodes] * 2


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"of_part": 7}, "extra .top. of episodes that do not exist"),
        ({"expanded_bytes": 1}, "columns of [0-9]+ bytes, where the database has 1"),
    ],
)
async def test_wrong_columns_are_reported(
    store: Store, url: str, values: dict[str, int], reason: str
) -> None:
    buffer = await store.buffer("math")
    [group_id] = await buffer.put(EpisodeGroup("gsm8k", [heavy(0)]))
    async with transaction(url) as connection:
        mine = payload.c.field == "top"
        await connection.execute(update(payload).where(mine).values(values))
    with pytest.raises(rdb.CorruptPayloadError, match=reason):
        await buffer.get([group_id])
    assert {one.kind for one in (await verify(store)).problems} == {"payload"}


@pytest.mark.parametrize("adds", [False, True])
async def test_format_1_cannot_hold_everything(own_url: str, adds: bool) -> None:
    """The error names the command, and nothing is written."""
    await migrations.write_format(own_url, 1)
    first = Turn(prompt_ids=[1], response_ids=[2])
    second = Turn(parent=first, new_ids=[3], response_ids=[4])
    short = Episode(prompt_ids=[1, 2], response_ids=[3], token_extras={"x": [1, 2]})
    ragged = Episode(prompt_ids=[1], response_ids=[2], token_extras={"x": Ragged([5], [1, 0])})
    marks: dict[str, Any] = {"uid": "a", "agent": "a", "state": "a", "is_discarded": True}
    marked = [
        (name, Turn(prompt_ids=[1], response_ids=[2], **{name: value}))
        for name, value in marks.items()
    ]
    async with Store.open(own_url) as store:
        buffer = await store.buffer("math")
        await buffer.open_group("gsm8k", "open", 2)
        for one, field in (
            (Episode(turns=[first, second]), r"episodes\[0\]\.turns\[1\]\.parent"),
            (short, r"episodes\[0\]\.token_extras\['x'\]"),
            *(
                (Episode(turns=[turn]), rf"episodes\[0\]\.turns\[0\]\.{name}")
                for name, turn in marked
            ),
            (ragged, r"episodes\[0\]\.token_extras\['x'\]"),
        ):
            refused = rf"^{field}: expected .*`replaydb db write-format 2`"
            call = buffer.add_episode("open", one) if adds else buffer.put(EpisodeGroup("t", [one]))
            with pytest.raises(rdb.InvalidInputError, match=refused):
                await call
        assert await parts(own_url) == []
