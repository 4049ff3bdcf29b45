"""What each token of an episode says."""

from __future__ import annotations

import pytest

from replaydb.decoding import LONGEST_SIGN, pieces


def of_bytes(ids: list[int]) -> str:
    """A tokenizer of bytes."""
    return bytes(ids).decode("utf-8", "replace")


def of_words(ids: list[int]) -> str:
    """One that leaves out the blank before the first word, as those of SentencePiece do."""
    return " ".join(f"w{one}" for one in ids)


@pytest.mark.parametrize("text", ["", "ab", "naïve 🦕 日本", "\ufffd!", "x" * 100])
def test_pieces_are_the_text(text: str) -> None:
    ids = list(text.encode())
    said = pieces(ids, of_bytes)
    assert len(said) == len(ids)
    assert "".join(said) == text


def test_the_last_token_of_a_sign_has_it() -> None:
    assert pieces(list("aé🦕".encode()), of_bytes) == ["a", "", "é", "", "", "", "🦕"]


def test_blanks_between_words_are_kept() -> None:
    assert pieces([1, 2, 3], of_words) == ["w1", " w2", " w3"]


def test_what_is_no_text_costs_no_more() -> None:
    """A model may well end within a sign, or write bytes that never become one."""
    most = 0

    def decode(ids: list[int]) -> str:
        nonlocal most
        most = max(most, len(ids))
        return of_bytes(ids)

    said = pieces([0x80] * 500 + [0x61], decode)
    assert "".join(said) == "\ufffd" * 500 + "a"
    assert most <= 2 * LONGEST_SIGN
