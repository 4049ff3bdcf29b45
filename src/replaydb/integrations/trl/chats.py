"""Chat completions: readable text, and the messages themselves in the metadata of an episode."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from replaydb.errors import InvalidInputError

#: Key of the metadata whose value is the messages of a chat completion, as JSON text. It is text
#: because a tool call may hold numbers that JSON columns refuse, such as NaN or 70-bit integers.
MESSAGES = "completion_json"


def to_text(completion: Any) -> str | None:
    """Return the text that determines a completion; None if it is more than that.

    It is a text, or a single message of the assistant with nothing but a text.
    """
    match completion:
        case str():
            return completion
        case [{"role": "assistant", "content": str(content), **others}] if not others:
            return content
    return None


def to_metadata(completion: Any) -> dict[str, str]:
    """Return the metadata entry that holds the messages of a completion.

    What a tool returned may be no JSON. It becomes text, as it did in the tokens. The JSON text is
    not ASCII, in which two unpaired surrogates that are neighbours read as one character.

    Raises:
        InvalidInputError: A key of an object is no text, or the messages contain themselves.
    """
    try:
        return {MESSAGES: json.dumps(completion, default=str, ensure_ascii=False)}
    except (TypeError, ValueError) as error:
        raise InvalidInputError("completion", "messages as JSON objects", error) from error


def from_metadata(metadata: Mapping[str, Any]) -> Any:
    """Return the messages that `to_metadata` stored."""
    return json.loads(metadata[MESSAGES])
