"""Generated text survives storage, whatever it contains."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given

from replaydb.util import escapes
from support import samples


@given(samples.generated)
def test_every_text_has_a_storable_form(text: str) -> None:
    stored = escapes.escape(text)
    assert "\0" not in stored
    stored.encode()
    assert escapes.unescape(stored) == text


@given(samples.metadata)
def test_every_json_value_has_a_storable_form(value: dict[str, Any]) -> None:
    for ascii_only in True, False:
        stored = escapes.to_json(value, ensure_ascii=ascii_only)
        assert "\\u0000" not in stored.replace("\\\\", "")
        stored.encode()
        assert escapes.from_json(stored) == value


@pytest.mark.parametrize(
    ("text", "stored"),
    [
        ("\0", "␛0000"),
        ("\ud83d\ude00", "␛d83d␛de00"),
        ("␛0000", "␛241b0000"),
        ("␛ and \U0001f600", "␛ and \U0001f600"),
    ],
)
def test_forms_of_other_versions_are_read_forever(text: str, stored: str) -> None:
    assert escapes.escape(text) == stored
    assert escapes.from_json(json.dumps({"␛0000": [stored]})) == {"␛0000": [text]}
