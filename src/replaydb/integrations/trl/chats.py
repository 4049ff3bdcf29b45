"""Chat completions: readable text, and their messages in the metadata of an episode."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from replaydb.errors import InvalidInputError

#: Metadata key whose value is the messages of a chat completion, as JSON text. It is text because a
#: tool call can contain numbers that JSON columns refuse, such as NaN or 70-bit integers.
MESSAGES = "completion_json"


def to_text(completion: Any) -> str | None:
    """Return the text of a completion; None if the completion is more than text.

    A completion with text only is a string, or a single assistant message without other fields.
    """
    match completion:
        case str():
            return completion
        case [{"role": "assistant", "content": str(content), **others}] if not others:
            return content
    return None


def to_metadata(completion: Any) -> dict[str, str]:
    """Return the metadata entry with the messages of a completion.

    Tool results that are not JSON become text, as they did in the tokens. The JSON text is not
    ASCII, because two escaped unpaired surrogates in a row would be read as one character.

    Raises:
        InvalidInputError: A key of an object is not text, or the messages contain themselves.
    """
    try:
        return {MESSAGES: json.dumps(completion, default=str, ensure_ascii=False)}
    except (TypeError, ValueError) as error:
        raise InvalidInputError("completion", "messages as JSON objects", error) from error


def from_metadata(metadata: Mapping[str, Any]) -> Any:
    """Return the messages from the metadata entry of `to_metadata`."""
    return json.loads(metadata[MESSAGES])
