"""Responses of servers with OpenAI's chat and completions APIs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from replaydb import InvalidInputError
from replaydb.integrations.serving.completion import Completion
from replaydb.integrations.serving.fields import (
    aligned,
    check_count,
    finished,
    first,
    floats,
    get,
    in_order,
    non_empty,
    parsed,
    token_ids,
    versions,
)
from replaydb.integrations.serving.sglang import sampled

#: Fields of stream chunks that are concatenated: texts, and lists with an entry per token.
_CONCATENATED = frozenset(
    [
        *("arguments", "content", "reasoning", "reasoning_content", "text"),
        *("token_ids", "token_logprobs", "tokens"),
    ]
)

_LOGPROBS = "request them with logprobs=True (in the completions API: logprobs=1)"
_FINAL = "a finish reason: a stream is complete only with its last chunk"
_IDS = "request them with vLLM's return_token_ids=True, or SGLang's return_meta_info=True"
_PROMPT = (
    "request them with vLLM's return_token_ids=True or SGLang's return_prompt_token_ids=True, "
    "or pass prompt_ids= as they were sent"
)


def from_openai(response: Any, *, prompt_ids: Iterable[int] | None = None) -> list[Completion]:
    """Convert a response of OpenAI's chat or completions API to completions, sorted by index.

    OpenAI itself returns no token ids. vLLM returns them with `return_token_ids` (or, in the
    logprobs, with `return_tokens_as_token_ids`), SGLang with `return_meta_info` and
    `return_prompt_token_ids`.

    Args:
        response: The response, as an object or JSON, or all chunks of a stream.
        prompt_ids: Tokens of the prompt, if the server does not return them.

    Raises:
        InvalidInputError: Tokens or logprobs are missing, their number differs from `usage`, or
            the response is not finished.
    """
    response = parsed(response)
    if get(response, "choices") is None:
        response = _joined(response)
    given = None if prompt_ids is None else list(prompt_ids)
    metadata = get(response, "metadata")
    found: list[Completion] = []
    for where, one in in_order("choices", get(response, "choices")):
        meta = get(one, "meta_info")
        if meta is not None:
            ids, logprobs = sampled(f"{where}.meta_info", meta, get(one, "token_ids"))
        else:
            ids, logprobs = _chosen(where, one)
        prompt = first(given, get(one, "prompt_token_ids"), get(response, "prompt_token_ids"))
        message = get(one, "message") or get(one, "delta")
        calls = _calls(where, get(message, "tool_calls"))
        reasoning = first(get(message, "reasoning"), get(message, "reasoning_content"))
        found.append(
            Completion(
                token_ids(f"{where}.prompt_token_ids", prompt, _PROMPT),
                ids,
                logprobs,
                first(get(one, "text"), _content(message, beside=calls or reasoning)),
                finished(f"{where}.finish_reason", get(one, "finish_reason"), _FINAL),
                first(
                    versions(f"{where}.meta_info.", meta, len(ids)),
                    versions(f"{where}.", one, len(ids)),
                    # SGLang's metadata is about the first choice.
                    None if found else versions("metadata.", metadata, len(ids)),
                ),
                get(response, "prompt_text"),
                non_empty(
                    request_id=first(get(response, "id"), get(response, "request_id")),
                    stop_reason=first(get(one, "stop_reason"), get(one, "matched_stop")),
                    tool_calls=calls,
                    reasoning=reasoning,
                ),
            )
        )
    sampled_in_all = [token for one in found for token in one.response_ids]
    check_count("choices", sampled_in_all, get(get(response, "usage"), "completion_tokens"))
    return found


def _chosen(where: str, choice: Any) -> tuple[list[int], list[float]]:
    """Return tokens and logprobs of a choice of OpenAI's API, with vLLM's additions."""
    logprobs = get(choice, "logprobs")
    content = get(logprobs, "content")
    if content is None:  # the completions API
        tokens, values = get(logprobs, "tokens"), get(logprobs, "token_logprobs")
    elif isinstance(content, Sequence):  # vLLM's generate API has the ids instead of texts
        tokens = [first(get(one, "token_id"), get(one, "token")) for one in content]
        values = [get(one, "logprob") for one in content]
    else:
        raise InvalidInputError(f"{where}.logprobs.content", "a list", repr(content))
    ids, named = get(choice, "token_ids"), _named(where, tokens)
    found = token_ids(f"{where}.token_ids", named if ids is None else ids, _IDS)
    logprobs = floats(f"{where}.logprobs", aligned(f"{where}.logprobs", values, found, _LOGPROBS))
    if named is not None and named != found:
        raise InvalidInputError(f"{where}.logprobs", f"logprobs of the tokens {found}", named)
    return found, logprobs


def _named(where: str, tokens: Any) -> list[int] | None:
    """Return the ids that vLLM wrote in place of token texts, or None."""
    names = [f"token_id:{one}" if isinstance(one, int) else str(one) for one in tokens or ()]
    if not names or not all(one.startswith("token_id:") for one in names):
        return None
    try:
        return [int(one.removeprefix("token_id:")) for one in names]
    except ValueError as error:
        raise InvalidInputError(f"{where}.logprobs", "token_id:NUMBER", str(error)) from None


def _content(message: Any, *, beside: Any) -> Any:
    """Return the text of a message; None if it is empty beside a tool call or reasoning.

    Streams and some servers report "" for a message without text, others null.
    """
    content = get(message, "content")
    return None if beside and content == "" else content


def _calls(where: str, tool_calls: Any) -> list[Any]:
    """Return tool calls as JSON, without the index that streams and SGLang add."""
    try:
        calls = [
            call if isinstance(call, Mapping) else call.model_dump(exclude_none=True)
            for call in tool_calls or []
        ]
    except (AttributeError, TypeError):
        expected = "a list of objects"
        raise InvalidInputError(f"{where}.tool_calls", expected, repr(tool_calls)) from None
    return [{name: value for name, value in call.items() if name != "index"} for call in calls]


def _joined(chunks: Any) -> dict[str, Any]:
    """Join the chunks of a stream into the response that would have been returned at once."""
    if isinstance(chunks, Mapping) or not isinstance(chunks, Iterable):
        raise InvalidInputError("choices", "a response with choices, or chunks", repr(chunks))
    whole: dict[str, Any] = {}
    for i, chunk in enumerate(chunks):
        try:
            delta = chunk if isinstance(chunk, Mapping) else chunk.model_dump()
            for name in ("id", "request_id"):
                before = whole.get(name)
                if before not in (None, delta.get(name, before)):
                    raise InvalidInputError(f"[{i}].{name}", f"{before!r}, as before", delta[name])
            _append(whole, delta)
        except (AttributeError, KeyError, TypeError):
            expected = "a chunk of a stream"
            raise InvalidInputError(f"[{i}]", expected, repr(chunk)) from None
    return whole


def _append(whole: dict[str, Any], delta: Mapping[str, Any]) -> None:
    for name, value in delta.items():
        if name in ("choices", "tool_calls"):
            entries = whole.setdefault(name, [])
            for entry in value or []:
                known = [one for one in entries if one["index"] == entry["index"]]
                if not known:
                    entries.append({})
                _append(known[0] if known else entries[-1], entry)
        elif isinstance(value, Mapping):
            _append(whole.setdefault(name, {}), value)
        elif name in _CONCATENATED and whole.get(name) is not None and value is not None:
            whole[name] += value
        elif value is not None:
            whole[name] = value[:] if name in _CONCATENATED else value
