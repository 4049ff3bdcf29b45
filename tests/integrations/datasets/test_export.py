"""Hugging Face `datasets` loads an export directly."""

from __future__ import annotations

from pathlib import Path

import datasets

import replaydb as rdb
from replaydb import analysis
from replaydb.exchange import export_groups


async def test_datasets_loads_an_export(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'replay.db'}"
    async with rdb.Store.open(url) as store:
        buffer = await store.buffer("math")
        for task in ("gsm8k", "test"):
            rows = [rdb.Episode(prompt_ids=[1], response_ids=[2, n], reward=n) for n in range(3)]
            await buffer.put(rdb.EpisodeGroup(task, rows, prompt_uid="p"))
    for kind, loader in (("parquet", "parquet"), ("jsonl", "json")):
        export_groups(url, tmp_path / kind, format=kind)  # type: ignore[arg-type]
        loaded = datasets.load_dataset(
            loader, data_dir=str(tmp_path / kind), cache_dir=str(tmp_path / "cache"), split="train"
        )
        assert loaded.num_rows == 6
        assert sorted(row["reward"] for row in loaded) == [0, 0, 1, 1, 2, 2]
        assert loaded[2]["token_ids"] == [1, 2, 2]
    assert datasets.Dataset(analysis.tokens(url).to_table()).num_rows == 6
