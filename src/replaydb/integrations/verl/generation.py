"""Agent loop managers that generate only prompts without a stored answer."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np
import torch
import transfer_queue as tq
from tensordict import TensorDict
from verl.trainer.ppo.v1 import AgentLoopManagerTQ
from verl.utils import tensordict_utils as tu

from replaydb import InvalidInputError
from replaydb.integrations.verl.journal import TRAIN, Journal
from replaydb.integrations.verl.trajectories import rows

#: Fields that a dispatch adds to a prompt; they differ between dispatches.
_OF_DISPATCH = {"uid", "global_steps", "dummy_tensor"}


class DurableGeneration:
    """A mixin for agent loop managers. Name it first: `class Mine(DurableGeneration, MyManager)`.

    The first prompts after a restart contain the step at which training resumes. Later steps are
    undone in the store. A prompt that was answered in these steps is answered from the store when
    the dataset reaches it again; only the others are generated.

    Args:
        config: The complete configuration, with `trainer.v1.sampler.sampler_kwargs`.
        arguments: Other arguments of the manager.

    Raises:
        InvalidInputError: `url` or `run` of the sampler is missing.
    """

    def __init__(self, config: Any, *arguments: Any, **options: Any) -> None:
        super().__init__(config, *arguments, **options)  # type: ignore[call-arg]
        self._journal, _ = Journal.of(config.trainer.v1.sampler.sampler_kwargs)
        self._known: tuple[set[str], dict[str | None, list[str]]] | None = None

    def generate_sequences(self, prompts: TensorDict) -> None:
        """Put stored groups into the queue, and generate the others."""
        if tu.get(prompts, "validate", False):
            super().generate_sequences(prompts)  # type: ignore[misc]
            return
        step = tu.get(prompts, "global_steps")
        if self._known is None:
            self._known = self._journal.rewind(step - 1)
        queued, ahead = self._known
        wanted: dict[int, str] = {}
        stored: dict[str, str] = {}
        for i, row in enumerate(rows(prompts)):
            name = prompt_uid(row)
            if row["uid"] in queued:
                continue
            if ahead.get(name):
                stored[row["uid"]] = ahead[name].pop(0)
            else:
                wanted[i] = name
        if stored:
            self._journal.restore(list(stored.values()), step)
            tq.kv_clear(list(stored), TRAIN)
        if wanted:
            rest = tu.index_select_tensor_dict(prompts, list(wanted))
            tags = [{"prompt_uid": name} for name in wanted.values()]
            tq.kv_batch_put(tu.get(rest, "uid"), TRAIN, tags=tags)
            super().generate_sequences(rest)  # type: ignore[misc]


class DurableAgentLoopManager(DurableGeneration, AgentLoopManagerTQ):
    """verl's own manager with `DurableGeneration`."""


def prompt_uid(row: dict[str, Any]) -> str:
    """Return an id of a prompt that is the same for the same row of the dataset in any request.

    Raises:
        InvalidInputError: The row contains a value without comparable content.
    """
    content = {name: value for name, value in row.items() if name not in _OF_DISPATCH}
    text = json.dumps(content, sort_keys=True, default=_content)
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:32]


def _content(value: Any) -> Any:
    match value:
        case torch.Tensor() | np.ndarray() | np.generic():
            return value.tolist()
        case bytes():
            return value.hex()
    if hasattr(value, "tobytes"):  # an image
        return [str(getattr(value, "size", "")), hashlib.sha256(value.tobytes()).hexdigest()]
    expected = "numbers, text, arrays and images in the rows of a dataset"
    raise InvalidInputError("prompts", expected, type(value).__name__)
