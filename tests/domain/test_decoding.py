"""Text of each token of an episode."""

from __future__ import annotations

import pytest

from replaydb.domain.decoding import LONGEST_CHARACTER, token_texts


def of_bytes(ids: list[int]) -> str:
    """A tokenizer of bytes."""
    return bytes(ids).decode("utf-8", "replace")


def of_words(ids: list[int]) -> str:
    """A tokenizer that omits the space before the first word, like those of SentencePiece."""
    return " ".join(f"w{one}" for one in ids)


@pytest.mark.parametrize("text", ["", "ab", "naïve 🦕 日本", "\ufffd!", "x" * 100])
def test_token_texts_add_up_to_the_text(text: str) -> None:
    ids = list(text.encode())
    texts = token_texts(ids, of_bytes)
    assert len(texts) == len(ids)
    assert "".join(texts) == text


def test_the_last_token_of_a_character_has_its_text() -> None:
    assert token_texts(list("aé🦕".encode()), of_bytes) == ["a", "", "é", "", "", "", "🦕"]


def test_spaces_between_words_are_kept() -> None:
    assert token_texts([1, 2, 3], of_words) == ["w1", " w2", " w3"]


def test_undecodable_bytes_cost_no_more() -> None:
    """A model may stop within a character, or generate bytes that never form one."""
    most = 0

    def decode(ids: list[int]) -> str:
        nonlocal most
        most = max(most, len(ids))
        return of_bytes(ids)

    texts = token_texts([0x80] * 500 + [0x61], decode)
    assert "".join(texts) == "\ufffd" * 500 + "a"
    assert most <= 2 * LONGEST_CHARACTER
