"""Random records of traces with a value in every field."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from integrations.verifiers.upstream import NODE_FIELDS, TRACE_FIELDS

_ids = st.integers(-(2**31), 2**31 - 1)
_text = st.text(max_size=5)
_names = st.none() | _text
_logprobs = st.floats(-1e30, 0) | st.sampled_from([-float("inf"), float("nan"), -0.0])
_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | _text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_text, inner, max_size=3),
    max_leaves=6,
)
_objects = st.dictionaries(_text, _json, max_size=3)
_spans = st.fixed_dictionaries({"start": st.floats(), "end": st.floats()})
_tool = st.fixed_dictionaries(
    {
        "name": _text,
        "description": _text,
        "parameters": _objects,
        "strict": st.none() | st.booleans(),
    }
)
_errors = st.fixed_dictionaries(
    {
        "type": _text,
        "message": _text,
        "status_code": st.none() | st.integers(),
        "traceback": _names,
    }
)
_usages = st.fixed_dictionaries(
    {
        "prompt_tokens": st.integers(),
        "completion_tokens": st.integers(),
        "cached_input_tokens": st.none() | st.integers(),
        "reasoning_tokens": st.none() | st.integers(),
        "cost": st.none() | st.floats(),
    }
)
_messages = st.one_of(
    st.fixed_dictionaries({"role": st.just("user"), "content": _text}),
    st.fixed_dictionaries(
        {
            "role": st.just("tool"),
            "tool_call_id": _text,
            "content": st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": _text})),
            "name": _names,
        }
    ),
    st.fixed_dictionaries(
        {
            "role": st.just("assistant"),
            "content": _names,
            "reasoning_content": _names,
            "tool_calls": st.none()
            | st.lists(st.fixed_dictionaries({"id": _text, "name": _text, "arguments": _text})),
            "provider_state": st.none() | st.lists(_objects, max_size=2),
        }
    ),
)


def sent(array: Any) -> dict[str, Any]:
    """An array as verifiers sends it."""
    its = {"dtype": str(array.dtype), "shape": list(array.shape), "data": array.tobytes()}
    return {"__nd__": True, **its}


def _images(values: Any) -> dict[str, Any]:
    return {
        "mm_hashes": {"image": ["a"]},
        "mm_placeholders": {"image": [{"offset": 0, "length": 2}]},
        "mm_items": {"image": [{"pixel_values": sent(np.array([values or [0.5]], np.float32))}]},
    }


@st.composite
def nodes(draw: Any, index: int) -> dict[str, Any]:
    """A value for each field of a node. Optional values can be missing, and masks have gaps."""
    size = draw(st.integers(0, 20))
    mask = draw(st.lists(st.booleans(), min_size=size, max_size=size) | st.just([False] * size))
    number = sum(mask)

    def of_sampled(values: Any) -> Any:
        return draw(st.none() | st.lists(values, min_size=number, max_size=number))

    def of_all(values: Any) -> Any:
        return draw(st.lists(values, min_size=size, max_size=size))

    def ragged() -> Any:
        counts = draw(st.lists(st.integers(0, 3), min_size=number, max_size=number))
        ids = np.arange(sum(counts), dtype=np.int32)
        one = {"ids": sent(ids), "counts": sent(np.array(counts, np.int32))}
        return draw(st.sampled_from([None, one]))

    shape = (size + draw(st.sampled_from([0, 0, 0, 1])), draw(st.integers(1, 2)), 2)
    experts = np.arange(np.prod(shape)).astype(draw(st.sampled_from([np.uint8, np.int16])))
    links = st.fixed_dictionaries(
        {
            "type": st.sampled_from(["compaction_attempt", "compaction", "subagent_return"]),
            "node": st.integers(0, 5),
        }
    )
    found = {
        "parent": draw(st.none() | st.integers(0, index - 1)) if index else None,
        "tools": draw(st.lists(_tool, min_size=1, max_size=2)),
        "semantic_parents": draw(st.lists(links, max_size=2)),
        "message": draw(_messages),
        "sampled": number > 0,
        "timestamp": draw(st.floats()),
        "token_ids": of_all(_ids),
        "renderer_token_ids": draw(st.none() | st.lists(_ids, max_size=3)),
        "mask": mask if True in mask else draw(st.sampled_from([mask, []])),
        "is_content": draw(st.sampled_from([[], of_all(st.booleans())])),
        "logprobs": of_sampled(_logprobs) or [],
        "advantages": of_sampled(st.floats()),
        "reference_logprobs": of_sampled(st.floats()),
        "trainer_logprobs": of_sampled(st.floats()),
        "entropies": of_sampled(st.floats()),
        "loss_weights": draw(st.sampled_from([None, {}, {"ce": of_all(st.floats()), "\0": []}])),
        "routed_experts": draw(st.sampled_from([None, sent(experts.reshape(shape))])),
        "sampling_mask": ragged(),
        "multi_modal_data": draw(st.sampled_from([None, _images(of_sampled(st.floats(width=32)))])),
        "kept_tokens": ragged(),
    }
    assert set(found) >= NODE_FIELDS, "a field of MessageNode is not covered"
    return found


@st.composite
def records(draw: Any) -> dict[str, Any]:
    """A value for each field of a trace, of either version."""
    several = [draw(nodes(i)) for i in range(draw(st.integers(0, 5)))]
    call = {
        "node": st.none() | st.integers(0, 5),
        "model": _names,
        "sampling": st.none() | st.fixed_dictionaries({"temperature": st.none() | st.floats()}),
        "endpoint": _names,
        "finish_reason": st.sampled_from([None, "stop", "length", "tool_calls"]),
        "usage": st.none() | _usages,
        "time": _spans,
        "error": st.none() | _errors,
    }
    # Its default is an int, which validation makes a float.
    config = {"runtime": {"type": "prime", "idle_timeout": 3600.0}}
    reward = st.fixed_dictionaries({"score": st.floats(), "weight": st.floats()})
    trainable = st.sampled_from([True, True, False])
    found = {
        "version": 1,
        "id": draw(st.uuids().map(lambda uid: uid.hex)),
        "verifiers": {"version": "0.4.0", "commit": draw(_names)},
        "task": {"type": "T", "data": {"idx": 3, "answer": draw(_json)}, "key": None, "hash": "a"},
        "agent": {
            "config": config,
            "runtime": None,
            "name": "solver",
            "trainable": draw(trainable),
        },
        "tools": draw(st.lists(_tool, max_size=2)),
        "nodes": several,
        "calls": draw(st.lists(st.fixed_dictionaries(call), max_size=2)),
        "mm_token_type_id_map": draw(st.dictionaries(st.integers().map(str), _ids, max_size=2)),
        "request_rewrites": draw(st.sampled_from([[], [{"handler": "a"}]])),
        "response_rewrites": draw(st.sampled_from([[], [{"handler": "b"}]])),
        "rewards": draw(st.dictionaries(_text, st.none() | reward, max_size=3)),
        "metrics": draw(st.dictionaries(_text, st.none() | st.floats(), max_size=3)),
        "info": draw(_objects),
        "root_reply": draw(_names),
        "state": {"artifacts": draw(st.dictionaries(_text, st.none() | st.binary(), max_size=2))},
        "extra_usage": draw(st.lists(_usages, max_size=2)),
        "is_completed": draw(st.booleans()),
        "ok": draw(st.booleans()),
        "stop_condition": draw(_names),
        "is_timeout": draw(st.booleans()),
        "errors": draw(st.lists(_errors, max_size=2)),
        "timing": {
            **{name: draw(_spans) for name in ("boot", "setup", "finalize", "scoring")},
            "start": draw(st.floats()),
            "agent": draw(_spans) | {"model": {"duration": draw(st.floats())}},
        },
    }
    assert set(found) >= TRACE_FIELDS, "a field of Trace is not covered"
    return found
