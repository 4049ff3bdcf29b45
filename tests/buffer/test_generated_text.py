"""Generated text is stored, queried and read unchanged, whatever it contains."""

from __future__ import annotations

from sqlalchemy import select

from replaydb import Buffer, Episode, EpisodeGroup, Turn, analysis
from replaydb.database.tables.schema import episode as episode_table
from support.connections import transaction
from support.groups import GENERATED, STORED, episode


async def test_generated_text_comes_back_bit_for_bit(buffer: Buffer) -> None:
    turn = Turn(prompt_ids=[1], response_ids=[2], metadata={"tool": [GENERATED]})
    given = EpisodeGroup(
        "chat",
        [
            episode(text=GENERATED, metadata={"reasoning": {"text": GENERATED}}),
            Episode(turns=[turn], reward=0.0, text=GENERATED),
        ],
        prompt=[{"role": "user", "content": GENERATED}],
    )
    [group_id] = await buffer.put([given])
    await buffer.open_group("chat", "incremental", 2, prompt=GENERATED)
    for _ in range(2):
        await buffer.add_episode("incremental", given.episodes[0])

    first, second = await buffer.get(uids=[given.group_uid, "incremental"])
    assert first.episodes == given.episodes
    assert first.prompt == given.prompt
    assert second.prompt == GENERATED
    assert second.episodes == (given.episodes[0],) * 2
    assert await buffer.texts([group_id]) == {group_id: {0: GENERATED, 1: GENERATED}}
    assert len(await buffer.sample(2)) == 2


async def test_sql_and_frames_have_the_stored_form(buffer: Buffer, url: str) -> None:
    given = episode(text=GENERATED, metadata={"note": GENERATED})
    await buffer.put(EpisodeGroup("chat", [given]))
    async with transaction(url) as connection:
        note = episode_table.c.metadata["note"].as_string()
        assert await connection.scalar(select(note)) == STORED
    for rows in analysis.episodes(url), analysis.tokens(url):
        assert rows.to_table()["text"].to_pylist() == [STORED]
