"""The example trains with TRL's real trainers, on datasets from the buffer."""

from __future__ import annotations

from pathlib import Path

from examples import datasets_sft_dpo

from support.engines import postgresql_nightly


@postgresql_nightly
def test_sft_and_dpo(url: str, tmp_path: Path) -> None:
    loss, accuracy = datasets_sft_dpo.train(url, str(tmp_path), steps=10)
    assert loss < 2.5  # by chance it is log(17) = 2.8
    assert accuracy > 0.5
