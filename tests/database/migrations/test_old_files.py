"""Files of older versions, which every later version must be able to open."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

import replaydb as rdb
from replaydb.database import migrations
from replaydb.database.tables.schema import REVISIONS

DATA = Path(__file__).resolve().parents[2] / "data"


def test_every_revision_has_a_file() -> None:
    assert (
        tuple(
            path.name.removeprefix("revision_").removesuffix(".db.gz")
            for path in sorted(DATA.glob("revision_*.db.gz"))
        )
        == REVISIONS
    )


@pytest.mark.parametrize("revision", REVISIONS)
async def test_an_old_file_opens_with_all_its_data(revision: str, tmp_path: Path) -> None:
    path = tmp_path / "replay.db"
    path.write_bytes(gzip.decompress((DATA / f"revision_{revision}.db.gz").read_bytes()))
    url = f"sqlite:///{path}"
    assert await migrations.current(url) == revision

    async with rdb.Store.open(url, migrate=True) as store:
        buffer = await store.buffer("math", create=False)
        assert (buffer.policy_version, buffer.settings.max_staleness) == (3, 4)
        groups = await buffer.get([1, 2, 3, 4, 5])
        assert [(group.group_uid, group.task_name) for group in groups] == [
            ("group-0", "gsm8k"),
            ("group-1", "code"),
            ("group-2", "gsm8k"),
            ("group-3", "code"),
            ("group-4", "gsm8k"),
        ]
        assert sum(group.times_sampled for group in groups) == 2
        assert {group.staleness for group in groups} == {1}
        assert groups[3].tags == {"level": "hard"}
        second = groups[3].episodes[1]
        assert second.reward == 1.0
        assert list(second.token_ids) == [10, 11, 12, 3, 1]
        (new_id,) = await buffer.put(
            rdb.EpisodeGroup(
                task_name="gsm8k",
                episodes=[rdb.Episode(prompt_ids=[1], response_ids=[2], reward=0.0)],
            )
        )
        assert new_id == 7  # 6 was deleted, and is not used again
        assert len((await buffer.sample(6, rdb.Uniform())).ids) == 6
    assert await migrations.check(url) == ()
