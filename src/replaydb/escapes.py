"""Generated text as databases and files can hold it, and back.

A model can produce every character, but PostgreSQL stores no NUL, and UTF-8 has no form for an
unpaired surrogate. These characters are stored as U+241B (the symbol for escape) and the four
hexadecimal digits of their code point: NUL is `␛0000`. Where a text itself contains such a
sequence, its U+241B is stored as `␛241b`. All other text is stored unchanged.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

_CODES = "0000|d[89a-f][0-9a-f]{2}|241b"
_UNSTORABLE = re.compile(f"[\0\ud800-\udfff]|␛(?={_CODES})")
_ESCAPE = re.compile(f"␛({_CODES})")
#: In the bytes of ASCII JSON text wherever `unescaped` would change it.
JSON_MARK = rb"\u241b"
#: Finds every JSON text that has such a character, and some that have none.
_SUSPECT = re.compile(r"\\u(0000|d[89a-f]|241b)|[\ud800-\udfff␛]", re.IGNORECASE)


def escape(text: str) -> str:
    """Text without NUL characters and unpaired surrogates; `unescape` reverses it."""
    return _UNSTORABLE.sub(lambda match: f"␛{ord(match[0]):04x}", text)


def unescape(text: str) -> str:
    """The text that `escape` was given."""
    return _ESCAPE.sub(lambda match: chr(int(match[1], 16)), text)


def to_json(value: Any, **options: Any) -> str:
    """JSON text with escaped strings; keys are taken to need no escape.

    Args:
        value: Plain JSON, as `checks.json_object` returns it.
        options: Of `json.dumps`.
    """

    def dumped(value: Any) -> str:
        return json.dumps(value, allow_nan=False, **options)

    text = dumped(value)
    return dumped(_mapped(escape, value)) if _SUSPECT.search(text) else text


def from_json(text: str) -> Any:
    """The value that `to_json` was given; other JSON text as it is."""
    value = json.loads(text)
    return unescaped(value) if _SUSPECT.search(text) else value


def unescaped(value: Any) -> Any:
    """A JSON value with all its strings unescaped, except keys."""
    return _mapped(unescape, value)


def _mapped(change: Callable[[str], str], value: Any) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {key: _mapped(change, item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(change, item) for item in value]
    return value
