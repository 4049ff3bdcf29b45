"""Agent loop managers that generate what is not there yet, and nothing twice."""

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
from replaydb.integrations.verl.rows import rows

#: What a dispatch adds to a prompt, and what differs from one to the next.
_OF_DISPATCH = {"uid", "global_steps", "dummy_tensor"}


class DurableGeneration:
    """To be mixed into a manager, before its class: `class Mine(DurableGeneration, MyManager)`.

    The first prompts that come after a restart say at which step it goes on; what happened after
    that step is undone in the store. A prompt that was answered then is answered from the store
    when the dataset comes to it again, and only the others are generated.

    Args:
        config: The whole configuration, with `trainer.v1.sampler.sampler_kwargs`.
        arguments: What the manager takes besides.

    Raises:
        InvalidInputError: `url` or `run` of the sampler is missing.
    """

    def __init__(self, config: Any, *arguments: Any, **options: Any) -> None:
        super().__init__(config, *arguments, **options)  # type: ignore[call-arg]
        self._journal, _ = Journal.of(config.trainer.v1.sampler.sampler_kwargs)
        self._known: tuple[set[str], dict[str | None, list[str]]] | None = None

    def generate_sequences(self, prompts: TensorDict) -> None:
        """Put what is stored into the queue, and have the rest generated."""
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
    """verl's own manager, with `DurableGeneration`."""


def prompt_uid(row: dict[str, Any]) -> str:
    """The name of a prompt: the same for the same row of the dataset, whenever it is asked for.

    Raises:
        InvalidInputError: Something in the row has no content that could be compared.
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
