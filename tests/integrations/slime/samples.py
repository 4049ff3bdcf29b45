"""Random samples with a value in every field."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from integrations.slime.upstream import FIELDS, Sample

_ids = st.integers(-(2**31), 2**31 - 1)
_names = st.none() | st.text(max_size=5)
_logprobs = st.floats(-1e30, 0) | st.sampled_from([-float("inf"), float("nan"), -0.0])
_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
_objects = st.dictionaries(st.text(max_size=5), _json, max_size=3)
_tensors = st.sampled_from(
    [
        torch.tensor([[0.5, -0.0], [float("nan"), 1.0]]),
        torch.tensor([1.5, 2.5], dtype=torch.bfloat16),
        torch.arange(20),
        torch.tensor(True),
        np.arange(6, dtype=np.uint8).reshape(1, 2, 3),
        b"\xff\x00",
    ]
)
_images = st.none() | st.dictionaries(
    st.text(max_size=5), _tensors | st.lists(_tensors), max_size=2
)
prompts = st.text(max_size=5) | st.lists(_objects, max_size=2)


@st.composite
def _like(draw: Any, array: Any) -> Any:
    """The values of an array as a tensor, an array or a list, or None."""
    form = draw(st.sampled_from([torch.tensor, np.array, np.ndarray.tolist, lambda _: None]))
    return form(array)


@st.composite
def fields(draw: Any, prompt: Any = None) -> dict[str, Any]:
    """A value for each field of a sample, also lengths that do not fit."""
    before, size = draw(st.integers(0, 4)), draw(st.integers(0, 20))
    length = before + size

    def of_response(values: Any) -> Any:
        return draw(st.none() | st.lists(values, min_size=size, max_size=size))

    counts = draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
    offsets = np.cumsum([0, *counts]).astype(draw(st.sampled_from([np.int32, np.int64])))
    rows = max(length - 1, 0) + draw(st.sampled_from([0, 0, 0, 1]))
    shape = (rows, draw(st.integers(1, 2)), 2)
    experts = np.arange(np.prod(shape)).reshape(shape)
    found = {
        "group_index": draw(st.none() | st.integers()),
        "index": draw(st.none() | st.integers()),
        "rollout_id": draw(st.none() | st.integers()),
        "prompt": draw(prompts if prompt is None else st.just(prompt) | prompts),
        "tokens": draw(st.lists(_ids, min_size=length, max_size=length)),
        "multimodal_inputs": draw(_images),
        "multimodal_train_inputs": draw(_images),
        "multimodal_train_input_id": draw(_names),
        "apply_chat_template_kwargs": draw(_objects),
        "response": draw(st.text(max_size=5)),
        "response_length": size,
        "label": draw(_names),
        "reward": draw(st.none() | st.floats() | st.integers() | st.booleans() | _objects),
        "loss_mask": of_response(st.sampled_from([0, 1])),
        "weight_versions": draw(st.lists(st.sampled_from(["3", "12", "default", 7]), max_size=2)),
        "rollout_log_probs": of_response(_logprobs),
        "rollout_top_p_token_ids": draw(_like(np.arange(offsets[-1], dtype=np.int32))),
        "rollout_top_p_token_offsets": draw(_like(offsets)),
        "rollout_routed_experts": draw(_like(experts.astype(draw(st.sampled_from("ib"))))),
        "remove_sample": draw(st.booleans()),
        "teacher_log_probs": of_response(st.floats()),
        "status": draw(st.sampled_from([one.value for one in type(Sample().status)])),
        "metadata": draw(_objects),
        "generate_function_path": draw(_names),
        "custom_rm_path": draw(_names),
        "train_metadata": draw(st.none() | _objects),
        "session_id": draw(_names),
        "non_generation_time": draw(st.floats()),
        "spec_info": {name: draw(st.integers()) for name in Sample().to_dict()["spec_info"]},
        "prefix_cache_info": {
            name: draw(st.integers()) for name in Sample().to_dict()["prefix_cache_info"]
        },
    }
    assert set(found) == FIELDS, "a field of Sample is not covered"
    return found


@st.composite
def groups(draw: Any) -> Any:
    """Samples of one prompt, as dicts, some in a list with the others of their rollout."""
    one = fields(draw(prompts))
    return draw(st.lists(one | st.lists(one, max_size=3), min_size=1, max_size=3))
