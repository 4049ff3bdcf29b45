"""Exact conversion of responses of vLLM, SGLang and OpenAI-compatible servers to episodes."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from openai.types import Completion as OpenAICompletion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

import replaydb as rdb
from integrations.serving.recorded import (
    NEG_INF,
    PROMPT,
    RIGHT,
    WRONG,
    logprob,
    sglang_answer,
    sglang_chat,
    spans,
    vllm_chat,
    vllm_chunks,
    vllm_completion,
    vllm_generate,
    vllm_output,
    vllm_tool_call,
)
from replaydb.integrations.serving import (
    Completion,
    from_openai,
    from_sglang,
    from_vllm,
    to_group,
)

Reader = Callable[[Any], list[Completion]]


def test_vllm_outputs_are_a_group() -> None:
    right, wrong = completions = from_vllm(vllm_output())
    assert (right.prompt_ids, right.response_ids, right.logprobs) == (PROMPT, RIGHT, [-0.5, -0.25])
    assert (wrong.response_ids, wrong.logprobs) == (WRONG, [-1.5, -2.0, -0.5])
    assert (right.text, right.finish_reason, wrong.finish_reason) == (" 4", "stop", "length")
    assert (right.policy_version, right.metadata) == (None, {"request_id": "7"})

    group = to_group("sums", completions, rewards=[1.0, 0.0], policy_version=3, prompt_uid="p/1")
    assert (group.prompt, group.prompt_uid, group.status) == ("2 + 2 =", "p/1", "completed")
    assert group.rewards.tolist() == [1.0, 0.0]
    assert group.texts == [" 4", " 5!"]
    assert (group.min_policy_version, group.max_policy_version) == (3, 3)
    episode = group.episodes[1]
    assert episode.token_ids.tolist() == [*PROMPT, *WRONG]
    assert episode.loss_mask.tolist() == [False] * 3 + [True] * 3
    assert episode.logprobs is not None
    assert episode.logprobs.tolist() == [0, 0, 0, -1.5, -2.0, -0.5]


def test_vllm_outputs_are_sorted_by_index() -> None:
    output = vllm_output()
    output.outputs.reverse()
    assert [one.response_ids for one in from_vllm(output)] == [RIGHT, WRONG]


class Flat(list[Any]):
    """Stands for vLLM's `FlatLogprobs`, which is a sequence of the same dicts."""


def test_logprobs_that_were_not_recorded_are_nan() -> None:
    output = vllm_output()
    output.outputs[0].logprobs = Flat([None, {9: logprob(NEG_INF, "")}])
    output.outputs[1].logprobs[1] = {6: logprob(None, "!")}
    right, wrong = from_vllm(output)
    assert [math.isnan(one) for one in [*right.logprobs, *wrong.logprobs]] == [
        *(True, True),
        *(False, True, False),
    ]
    (answered,) = from_sglang(sglang_answer(logprobs=(None, NEG_INF)))
    assert all(math.isnan(one) for one in answered.logprobs)
    assert math.isnan(from_openai(vllm_chat())[1].logprobs[2])  # -9999.0
    assert math.isnan(from_openai(vllm_completion())[0].logprobs[0])


def test_an_aborted_completion_aborts_its_group() -> None:
    output = vllm_output()
    aborted = output.outputs[1]
    aborted.token_ids, aborted.logprobs, aborted.text = [], None, ""
    aborted.finish_reason = "abort"
    group = to_group("sums", from_vllm(output), rewards=[1.0, None])
    assert group.status == "aborted"
    assert group.episodes[1].response_ids.tolist() == []
    assert to_group("sums", from_vllm(output), status="failed").status == "failed"

    reason = {"type": "abort", "message": "paused"}
    nothing = sglang_answer([], (), finish_reason=reason, completion_tokens=0)
    del nothing["meta_info"]["output_token_logprobs"]
    (empty,) = from_sglang(nothing)
    assert (empty.response_ids, empty.logprobs, empty.finish_reason) == ([], [], "abort")


def test_sglang_responses_report_their_version() -> None:
    several = [sglang_answer(), sglang_answer(WRONG, (-1.5, -2.0, -0.5), weight_version="default")]
    right, wrong = from_sglang(several)
    assert (right.prompt_ids, right.response_ids, right.logprobs) == (PROMPT, RIGHT, [-0.5, -0.25])
    assert (right.text, right.finish_reason) == (" 4", "stop")
    assert right.metadata == {"request_id": "0b7f", "stop_reason": 9}
    assert (right.policy_version, wrong.policy_version) == (12, None)
    assert to_group("sums", [right]).min_policy_version == 12
    assert from_sglang(several[0]) == [right]


def test_sglang_prompt_ids_from_the_caller() -> None:
    answer = sglang_answer(input_token_logprobs=[[None, 3, None]])  # of logprob_start_len=-1
    assert from_sglang(answer, prompt_ids=[7, 8])[0].prompt_ids == [7, 8]
    with pytest.raises(rdb.InvalidInputError, match="logprob_start_len=0") as caught:
        from_sglang([answer])
    assert caught.value.field == "[0].meta_info.input_token_logprobs"


def _same(answer: dict[str, Any]) -> Any:
    return answer


def _typed(answer: dict[str, Any]) -> Any:
    kind = ChatCompletion if answer["object"] == "chat.completion" else OpenAICompletion
    return kind.construct(**answer)  # as the client does, without validation


@pytest.fixture(params=[_same, _typed], ids=["json", "openai"])
def read(request: pytest.FixtureRequest) -> Reader:
    """Reads a response as JSON, or as an object of the OpenAI client."""
    return lambda answer: from_openai(request.param(answer))


def test_responses_as_json_text() -> None:
    assert from_openai(json.dumps(vllm_chat())) == from_openai(json.dumps(vllm_chat()).encode())
    assert from_openai(json.dumps(vllm_tool_call())) == from_openai(vllm_tool_call())
    assert from_sglang(json.dumps([sglang_answer()])) == from_sglang([sglang_answer()])


def test_vllm_chat(read: Reader) -> None:
    right, wrong = read(vllm_chat())
    assert (right.prompt_ids, right.response_ids, right.logprobs) == (PROMPT, RIGHT, [-0.5, -0.25])
    assert (right.text, right.finish_reason, wrong.text) == (" 4", "stop", " 5!")
    assert (wrong.response_ids, wrong.finish_reason) == (WRONG, "length")
    assert right.metadata == {"request_id": "chatcmpl-1"}
    assert right.policy_version is None


def test_token_ids_instead_of_texts(read: Reader) -> None:
    answer = vllm_chat()
    for choice in answer["choices"]:
        ids = choice.pop("token_ids")
        for token, step in zip(ids, choice["logprobs"]["content"], strict=True):
            step["token"] = f"token_id:{token}"  # return_tokens_as_token_ids
    assert [one.response_ids for one in read(answer)] == [RIGHT, WRONG]


def test_vllm_generate() -> None:
    right, wrong = from_openai(vllm_generate())
    assert (right.prompt_ids, right.response_ids, right.logprobs) == (PROMPT, RIGHT, [-0.5, -0.25])
    assert (right.text, right.finish_reason, right.policy_version) == (None, "stop", 12)
    assert (wrong.response_ids, math.isnan(wrong.logprobs[2])) == (WRONG, True)
    assert right.metadata == {"request_id": "5d0c"}

    chunks = [vllm_generate(), vllm_generate(), vllm_generate()]  # of a stream
    for chunk, keep in zip(chunks, (0, 1, 1), strict=True):
        chunk["choices"] = [chunk["choices"][keep]]
        del chunk["usage"]
    unfinished, last = chunks[1]["choices"][0], chunks[2]["choices"][0]
    unfinished.update(finish_reason=None, weight_versions=None, token_ids=WRONG[:1])
    last["token_ids"] = WRONG[1:]
    content = last["logprobs"]["content"]
    unfinished["logprobs"] = {"content": content[:1]}
    last["logprobs"] = {"content": content[1:]}
    assert repr(from_openai(chunks)) == repr([right, wrong])  # NaN differs from itself


def test_vllm_completion(read: Reader) -> None:
    (one,) = read(vllm_completion())
    assert (one.prompt_ids, one.response_ids, one.logprobs[1]) == (PROMPT, RIGHT, -0.25)
    assert one.text == " 4"
    assert one.metadata == {"request_id": "cmpl-1", "stop_reason": "###"}


def test_sglang_chat(read: Reader) -> None:
    (one,) = read(sglang_chat())
    assert (one.prompt_ids, one.response_ids, one.logprobs) == (PROMPT, RIGHT, [-0.5, -0.25])
    assert (one.text, one.finish_reason, one.policy_version) == (" 4", "stop", 12)
    assert one.metadata == {"request_id": "0b7f", "stop_reason": 9, "reasoning": "easy"}


@pytest.mark.parametrize("server", ["vllm", "sglang"])
def test_tool_calls_are_kept(read: Reader, server: str) -> None:
    answer = vllm_tool_call()
    if server == "sglang":
        message = answer["choices"][0]["message"]
        message["content"], message["tool_calls"][0]["index"] = "", 0
    (one,) = read(answer)
    function = {"name": "add", "arguments": '{"a": 2, "b": 2}'}
    assert one.metadata["tool_calls"] == [
        {"id": "call_1", "type": "function", "function": function}
    ]
    assert (one.text, one.finish_reason) == (None, "tool_calls")
    assert one.metadata["reasoning"] == "a sum"
    assert to_group("sums", [one]).episodes[0].metadata == dict(one.metadata)


@pytest.mark.parametrize("typed", [False, True], ids=["json", "openai"])
def test_a_stream(typed: bool) -> None:
    chunks = vllm_chunks()
    before = copy.deepcopy(chunks)
    answered = [ChatCompletionChunk.construct(**one) for one in chunks] if typed else chunks
    right, wrong = from_openai(iter(answered))
    assert (right.prompt_ids, right.response_ids, right.logprobs) == (PROMPT, RIGHT, [-0.5, -0.25])
    assert (right.text, right.finish_reason) == (" 4", "stop")
    assert (wrong.response_ids, wrong.logprobs) == (WRONG, [-1.5, -2.0, -0.5])
    function = {"name": "add", "arguments": "{}"}  # as in an answer that comes at once
    assert wrong.metadata["tool_calls"] == [
        {"id": "call_1", "type": "function", "function": function}
    ]
    assert (wrong.text, wrong.finish_reason) == (None, "tool_calls")
    assert chunks == before


def test_a_stream_of_reasoning_alone() -> None:
    chunks = vllm_chunks()
    for chunk in (chunks[3], chunks[4]):
        chunk["choices"][0]["delta"] = {"reasoning": "2"}
    wrong = from_openai(chunks)[1]
    assert (wrong.text, wrong.metadata["reasoning"]) == (None, "22")


def test_an_unfinished_stream_is_refused() -> None:
    with pytest.raises(rdb.InvalidInputError, match="last chunk") as caught:
        from_openai(vllm_chunks()[:-2])
    assert caught.value.field == "choices[0].finish_reason"


def _vllm(**changes: Any) -> SimpleNamespace:
    """Return an output with changes to its first completion."""
    output = vllm_output()
    vars(output.outputs[0]).update(changes)
    return output


def _without(answer: dict[str, Any], *path: Any, value: Any = None) -> dict[str, Any]:
    *parents, last = path
    parent: Any = answer
    for step in parents:
        parent = parent[step]
    parent[last] = value
    return answer


def _chat(*path: Any, value: Any) -> Callable[[], Any]:
    return lambda: from_openai(_without(vllm_chat(), *path, value=value))


def _echoed() -> dict[str, Any]:
    """A response with prompt and sampled tokens in one list, as token ids instead of texts."""
    answer = vllm_completion()
    del answer["choices"][0]["token_ids"]
    logprobs = answer["choices"][0]["logprobs"]
    logprobs["tokens"] = [f"token_id:{one}" for one in [*PROMPT, *RIGHT]]
    logprobs["token_logprobs"] = [None, -3.0, -1.0, -0.5, -0.25]
    return answer


def _others(kind: str) -> list[dict[str, Any]]:
    """Chunks of which one belongs to another response, or is not a chunk."""
    chunks = vllm_chunks()
    chunks[2] = {**chunks[2], "id": "chatcmpl-2"} if kind == "id" else {"choices": ["x"]}
    return chunks


_STEP = ("choices", 0, "logprobs", "content", 0)

REFUSED: list[tuple[Callable[[], Any], str, str]] = [
    (lambda: from_vllm(_vllm(logprobs=None)), "outputs[0].logprobs", "logprobs=0"),
    (lambda: from_vllm(_vllm(logprobs=[{}])), "outputs[0].logprobs", "each of 2 tokens"),
    (
        lambda: from_vllm(_vllm(logprobs=[{5: logprob(-1.0, "")}] * 2)),
        "outputs[0].logprobs[0]",
        "sampled token 4",
    ),
    (lambda: from_vllm(_vllm(token_ids=None)), "outputs[0].token_ids", "CompletionOutput"),
    (lambda: from_vllm(_vllm(finish_reason=None)), "outputs[0].finish_reason", "FINAL_ONLY"),
    (lambda: from_vllm(vllm_output(prompt_token_ids=None)), "prompt_token_ids", "prompt_embeds"),
    (lambda: from_vllm({"embedding": []}), "prompt_token_ids", "none"),
    (
        lambda: from_sglang(_without(sglang_answer(), "meta_info", "output_token_logprobs")),
        "meta_info.output_token_logprobs",
        "return_logprob=True",
    ),
    (
        lambda: from_sglang(_without(sglang_answer(), "output_ids", value=[4])),
        "meta_info.output_token_logprobs",
        "1 output tokens",
    ),
    (
        lambda: from_sglang([_without(sglang_answer(), "meta_info", "finish_reason")]),
        "[0].meta_info.finish_reason",
        "stream",
    ),
    (
        lambda: from_sglang({"error": {"message": "too long"}}),
        "meta_info.output_token_logprobs",
        "none",
    ),
    (
        lambda: from_openai(_without(vllm_chat(), "choices", 1, "token_ids")),
        "choices[1].token_ids",
        "return_token_ids=True",
    ),
    (
        lambda: from_openai(_without(vllm_chat(), "choices", 0, "logprobs")),
        "choices[0].logprobs",
        "logprobs=True",
    ),
    (
        lambda: from_openai(_without(vllm_chat(), "prompt_token_ids")),
        "choices[0].prompt_token_ids",
        "return_prompt_token_ids=True",
    ),
    (
        lambda: from_openai(
            _without(sglang_chat(), "choices", 0, "meta_info", "output_token_logprobs")
        ),
        "choices[0].meta_info.output_token_logprobs",
        "logprobs=True",
    ),
    (lambda: from_openai({"error": {"message": "no such model"}}), "choices", "no such model"),
    (lambda: from_openai(_echoed()), "choices", "the 2 tokens"),
    (_chat("usage", "completion_tokens", value=4), "choices", "the 4 tokens"),
    (
        lambda: from_sglang(
            _without(sglang_answer(completion_tokens=7), "output_ids"), prompt_ids=PROMPT
        ),
        "meta_info.output_token_logprobs",
        "the 7 tokens",
    ),
    (
        lambda: from_openai(
            _without(sglang_chat(), "choices", 0, "meta_info", "completion_tokens", value=3)
        ),
        "choices[0].meta_info.output_token_logprobs",
        "the 3 tokens",
    ),
    (
        _chat(
            *_STEP[:-1],
            value=[{"token": f"token_id:{one}", "logprob": -1.0} for one in (7, 8)],
        ),
        "choices[0].logprobs",
        "[7, 8]",
    ),
    (
        _chat(*_STEP[:-1], value=[{"token": "token_id:x", "logprob": -1.0}]),
        "choices[0].logprobs",
        "token_id:NUMBER",
    ),
    (
        lambda: from_openai(
            _without(vllm_generate(), *_STEP, value={"token_id": 8, "logprob": -0.5})
        ),
        "choices[0].logprobs",
        "[8, 9]",
    ),
    (lambda: from_openai(_others("id")), "[2].id", "'chatcmpl-1'"),
    (
        lambda: from_openai([vllm_generate(), {**vllm_generate(), "request_id": "9"}]),
        "[1].request_id",
        "'5d0c'",
    ),
    (lambda: from_openai(_others("no chunk")), "[2]", "a chunk"),
    (lambda: from_openai(["data: {}"]), "[0]", "a chunk"),
    (lambda: from_openai("data: {}"), "response", "JSON"),
    (_chat(*_STEP, "logprob", value="-0.5"), "choices[0].logprobs[0]", "'-0.5'"),
    (_chat(*_STEP, "logprob", value=0.5), "choices[0].logprobs[0]", "at most 0"),
    (_chat(*_STEP, "logprob", value=math.inf), "choices[0].logprobs[0]", "at most 0"),
    (_chat(*_STEP[:-1], value=7), "choices[0].logprobs.content", "a list"),
    (_chat("choices", 0, "token_ids", value=5), "choices[0].token_ids", "a list of token ids"),
    (_chat("choices", 0, "token_ids", value="49"), "choices[0].token_ids", "a list of token ids"),
    (_chat("choices", 0, "index", value="0"), "choices[0].index", "an integer"),
    (
        _chat("choices", 0, "message", "tool_calls", value=[5]),
        "choices[0].tool_calls",
        "a list of objects",
    ),
    (_chat("metadata", value={"weight_version": "9" * 5000}), "weight_version", "5000 digits"),
    (lambda: from_sglang(None), "response", "None"),
    (
        lambda: from_sglang(sglang_answer(output_token_logprobs=[[-0.5], [-0.25]])),
        "meta_info.output_token_logprobs",
        "for each token",
    ),
    (
        lambda: from_sglang(sglang_answer(input_token_logprobs=[1, 2, 3])),
        "meta_info.input_token_logprobs",
        "for each token",
    ),
    (lambda: from_vllm(_vllm(logprobs=[-0.5, -0.25])), "outputs[0].logprobs[0]", "token 4"),
    (lambda: from_openai(None), "choices", "None"),
    (lambda: from_openai([]), "choices", "None"),
    (
        lambda: to_group("sums", from_vllm(vllm_output()), rewards=[1.0]),
        "rewards",
        "one for each of 2 completions",
    ),
    (
        lambda: to_group(
            "sums", [*from_vllm(vllm_output()), *from_vllm(vllm_output(prompt_token_ids=[1]))]
        ),
        "completions[2].prompt_ids",
        "the same prompt",
    ),
]


@pytest.mark.parametrize(
    ("call", "field", "words"),
    REFUSED,
    ids=[f"{field}-{i}" for i, (_, field, _) in enumerate(REFUSED)],
)
def test_errors_name_the_field_and_the_option(
    call: Callable[[], Any], field: str, words: str
) -> None:
    with pytest.raises(rdb.InvalidInputError) as caught:
        call()
    assert caught.value.field == field
    assert words in str(caught.value)


def test_openai_prompt_ids_from_the_caller() -> None:
    answer = _without(vllm_chat(), "prompt_token_ids")
    assert {tuple(one.prompt_ids) for one in from_openai(answer, prompt_ids=PROMPT)} == {(1, 2, 3)}


CHANGED = [("7", 0, 2), ("8", 2, 3)]  # the weights changed before the last of three tokens


def _sglang_wrong(**meta: Any) -> dict[str, Any]:
    return sglang_answer(WRONG, (-1.5, -2.0, -0.5), **meta)


def _vllm_wrong(*several: tuple[Any, int, int], **changes: Any) -> SimpleNamespace:
    output = vllm_output()
    objects = [SimpleNamespace(**one) for one in spans(*several)]
    vars(output.outputs[1]).update(weight_versions=objects, **changes)
    return output


def _vllm_stream(*several: tuple[Any, int, int]) -> list[dict[str, Any]]:
    """Chunks of two choices. The last one of each has the spans of all its tokens."""
    chunks = vllm_chunks()
    chunks[5]["choices"][0]["weight_versions"] = spans(*several)
    chunks[6]["choices"][0]["weight_versions"] = spans(("7", 0, 2))
    return chunks


def _sglang_choices(*several: tuple[Any, int, int]) -> dict[str, Any]:
    answer = sglang_chat()
    meta = _sglang_wrong(weight_version="8", weight_versions=spans(*several))["meta_info"]
    answer["choices"].append({**answer["choices"][0], "index": 1, "meta_info": meta})
    answer["usage"]["completion_tokens"] = 5
    return answer


#: Responses with a completion of three tokens, and the given spans.
WITH_SPANS: dict[str, Callable[..., Completion]] = {
    "vllm": lambda *several: from_vllm(_vllm_wrong(*several))[1],
    "vllm-chat": lambda *several: from_openai(
        _without(vllm_chat(), "choices", 1, "weight_versions", value=spans(*several))
    )[1],
    "vllm-stream": lambda *several: from_openai(_vllm_stream(*several))[1],
    "vllm-generate": lambda *several: from_openai(
        _without(vllm_generate(), "choices", 1, "weight_versions", value=spans(*several))
    )[1],
    "sglang": lambda *several: from_sglang(
        _sglang_wrong(weight_version=several[-1][0], weight_versions=spans(*several))
    )[0],
    "sglang-chat": lambda *several: from_openai(_sglang_choices(*several))[1],
}


@pytest.mark.parametrize("server", WITH_SPANS)
def test_each_token_has_the_version_that_sampled_it(server: str) -> None:
    read = WITH_SPANS[server]
    changed = read(*CHANGED)
    assert changed.policy_version == [7, 7, 8]
    episode = changed.episode()
    assert episode.policy_version is not None
    assert (episode.min_policy_version, episode.max_policy_version) == (7, 8)
    assert changed.turn().policy_version.tolist() == [7, 7, 8]  # type: ignore[union-attr]
    assert read(("8", 0, 3)).policy_version == 8
    assert read(("7", 0, 1), ("7", 1, 1), ("7", 1, 3)).policy_version == 7


@pytest.mark.parametrize("server", WITH_SPANS)
def test_versions_that_are_not_reported_for_every_token_are_unknown(server: str) -> None:
    read = WITH_SPANS[server]
    unknown: list[list[tuple[Any, int, int]]] = [
        [("default", 0, 2), ("8", 2, 3)],
        [(None, 0, 3)],
        [("7", 1, 3)],
        [("7", 0, 1), ("8", 2, 3)],
        [("7", 0, 2)],
    ]
    assert [read(*several).policy_version for several in unknown] == [None] * 5
    wrong: list[list[tuple[Any, int, Any]]] = [
        [("7", 0, 4)],
        [("7", 0, 2), ("8", 1, 3)],
        [("7", -1, 3)],
        [("7", 0, 2.0)],
    ]
    for several in wrong:
        with pytest.raises(rdb.InvalidInputError, match="a span of the tokens from") as caught:
            read(*several)
        assert "weight_versions[" in str(caught.value.field)


def test_versions_of_several_choices_and_of_none() -> None:
    """SGLang repeats the versions of its first choice for the whole response."""
    answer = vllm_chat()  # token ids without SGLang's meta_info
    answer["metadata"] = {"weight_version": "8", "weight_versions": spans(("7", 0, 1), ("8", 1, 2))}
    right, wrong = from_openai(answer)
    assert (right.policy_version, wrong.policy_version) == ([7, 8], None)
    del answer["metadata"]["weight_versions"]  # an older server
    assert [one.policy_version for one in from_openai(answer)] == [8, None]

    nothing = sglang_answer(
        [], (), finish_reason={"type": "abort"}, weight_versions=spans(("12", 0, 0))
    )
    assert from_sglang(nothing)[0].policy_version == 12
    aborted = _vllm_wrong(token_ids=[], logprobs=None, finish_reason="abort")
    assert from_vllm(aborted)[1].policy_version is None
    with pytest.raises(rdb.InvalidInputError, match="a list of spans"):
        from_sglang(sglang_answer(weight_versions=7))


async def test_reported_versions_count(buffer: rdb.Buffer) -> None:
    """A version for completions without one does not replace those that a server reports."""
    completions = from_vllm(_vllm_wrong(*CHANGED))
    (group_id,) = await buffer.put([to_group("sums", completions, policy_version=9)])
    (stored,) = await buffer.get([group_id])
    assert (stored.min_policy_version, stored.max_policy_version) == (7, 9)
    assert stored.episodes[0].policy_version == 9
    assert stored.episodes[1].policy_version.tolist() == [7, 7, 7, 7, 7, 8]  # type: ignore[union-attr]
    await buffer.advance_policy(9)
    assert (await buffer.find())[0].staleness == 2


def test_responses_become_turns_of_an_agent() -> None:
    (called,) = from_openai(vllm_tool_call())
    (answered,) = from_sglang(sglang_answer(), prompt_ids=[*PROMPT, *RIGHT, 8])
    episode = rdb.Episode(turns=[called.turn(), answered.turn(reward=1.0, policy_version=11)])
    assert (episode.reward, episode.num_tokens) == (1.0, 8)  # the second continues the first
    assert [turn.finish_reason for turn in episode.turns] == ["tool_calls", "stop"]
    assert episode.turns[1].policy_version == 11


async def test_groups_of_responses_are_stored_unchanged(buffer: rdb.Buffer) -> None:
    """For each engine, on both databases, including NaN; a repeated response is one group."""
    groups = [
        to_group("vllm", from_vllm(vllm_output()), rewards=[1.0, 0.0], group_uid="vllm/7"),
        to_group("sglang", from_sglang(sglang_answer()), group_uid="sglang/0b7f"),
        to_group("openai", from_openai(vllm_chat()), group_uid="chatcmpl-1"),
        to_group("tool", from_openai(vllm_tool_call()), group_uid="tool"),
        to_group("openai", from_openai(vllm_completion()), prompt_ids=PROMPT, group_uid="cmpl-1"),
    ]
    ids = await buffer.put(groups)
    assert await buffer.put(groups, on_duplicate="ignore") == ids
    for stored, group in zip(await buffer.get(ids), groups, strict=True):
        assert stored == group
