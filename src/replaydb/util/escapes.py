"""Escape characters of generated text that databases and files cannot store, and unescape them.

A model can generate every character, but PostgreSQL stores no NUL, and UTF-8 cannot encode an
unpaired surrogate. These characters are stored as U+241B (the symbol for escape) and the four
hexadecimal digits of their code point: NUL is `␛0000`. If a text itself contains such a sequence,
its U+241B is stored as `␛241b`. All other text is stored unchanged.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

_CODES = "0000|d[89a-f][0-9a-f]{2}|241b"
_UNSTORABLE = re.compile(f"[\0\ud800-\udfff]|␛(?={_CODES})")
_ESCAPE = re.compile(f"␛({_CODES})")
#: Occurs in the bytes of every ASCII JSON text that `unescaped` would change.
JSON_MARK = rb"\u241b"
#: Matches every JSON text that has such a character, and some others.
_SUSPECT = re.compile(r"\\u(0000|d[89a-f]|241b)|[\ud800-\udfff␛]", re.IGNORECASE)


def escape(text: str) -> str:
    """Replace NUL characters and unpaired surrogates; `unescape` reverses it."""
    return _UNSTORABLE.sub(lambda match: f"␛{ord(match[0]):04x}", text)


def unescape(text: str) -> str:
    """Return the text that was passed to `escape`."""
    return _ESCAPE.sub(lambda match: chr(int(match[1], 16)), text)


def to_json(value: Any, **options: Any) -> str:
    """Return JSON text with escaped strings. Keys must not need an escape.

    Args:
        value: Plain JSON, as `checks.json_object` returns it.
        options: Options of `json.dumps`.
    """

    def dumped(value: Any) -> str:
        return json.dumps(value, allow_nan=False, **options)

    text = dumped(value)
    return dumped(_mapped(escape, value)) if _SUSPECT.search(text) else text


def from_json(text: str) -> Any:
    """Return the value that was passed to `to_json`, or the value of other JSON text."""
    value = json.loads(text)
    return unescaped(value) if _SUSPECT.search(text) else value


def unescaped(value: Any) -> Any:
    """Return a JSON value with all its strings unescaped, except keys."""
    return _mapped(unescape, value)


def _mapped(change: Callable[[str], str], value: Any) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {key: _mapped(change, item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(change, item) for item in value]
    return value
