"""Conversion of rows of episodes to rows of tokens."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from replaydb.analysis.episode_columns import extra_fields
from replaydb.errors import InvalidInputError

#: Columns repeated for every token; strings become dictionaries, which store each once.
_SHARED = (
    "group_id", "position", "buffer_name", "run_name", "task_name", "prompt_uid", "group_status",
    "staleness", "reward", "advantage",
)  # fmt: skip
#: Columns of the token, and the list columns that they come from.
_OWN = {
    "token_id": "token_ids", "loss_mask": "loss_mask", "logprob": "logprobs",
    "token_version": "token_versions", "token_reward": "token_rewards",
}  # fmt: skip


def token_schema(episodes: pa.Schema) -> pa.Schema:
    """Return the schema of rows of tokens, given the schema of rows of episodes."""
    fields = [_shared(episodes.field(name)) for name in _SHARED]
    fields += [pa.field("token_index", pa.int64()), pa.field("is_prompt", pa.bool_())]
    fields += [pa.field(own, episodes.field(name).type.value_type) for own, name in _OWN.items()]
    return pa.schema([*fields, *(pa.field(one.name, one.type.value_type)
                                 for one in extra_fields(episodes))])  # fmt: skip


def batch_of_tokens(schema: pa.Schema, episodes: pa.RecordBatch) -> pa.RecordBatch:
    """Return one row for each token of the episodes of a batch.

    Raises:
        InvalidInputError: A requested extra does not have one number for each token.
    """
    lengths = episodes["num_tokens"].to_numpy()
    parents = np.repeat(np.arange(len(lengths)), lengths)
    starts = np.cumsum(lengths) - lengths
    index = np.arange(len(parents)) - starts[parents]
    columns: list[pa.Array] = []
    for name in _SHARED:
        column = episodes[name]
        if pa.types.is_string(column.type):
            column = column.dictionary_encode()
        columns.append(column.take(pa.array(parents)))
    columns += [pa.array(index), pa.array(_is_prompt(episodes))]
    for name in (*_OWN.values(), *(one.name for one in extra_fields(episodes.schema))):
        column = episodes[name]
        sizes = pc.list_value_length(column)
        if pc.any(pc.not_equal(sizes, pa.array(lengths, sizes.type))).as_py():
            expected = "extras with one number for each token"
            raise InvalidInputError("extras", expected, f"{name!r}, of another shape")
        columns.append(_spread(column, parents))
    versions = schema.get_field_index("token_version")
    of_episodes = episodes["policy_version"].take(pa.array(parents)).cast(pa.int32())
    columns[versions] = pc.coalesce(columns[versions], of_episodes)
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _is_prompt(episodes: pa.RecordBatch) -> np.ndarray:
    """Return for each token whether it is in the prompt of its turn, or of its episode."""
    turns = episodes["turns"]
    counts = pc.fill_null(pc.list_value_length(turns), 0).to_numpy(zero_copy_only=False)
    num_turns = counts.clip(1)
    of_turns = np.repeat(counts > 0, num_turns)
    sizes, contexts = (
        np.repeat(episodes[name].to_numpy(), num_turns) for name in ("num_tokens", "prompt_length")
    )
    sizes[of_turns] = turns.flatten().field("num_tokens").to_numpy(zero_copy_only=False)
    contexts[of_turns] = turns.flatten().field("prompt_length").to_numpy(zero_copy_only=False)
    starts = np.cumsum(sizes) - sizes
    return np.arange(sizes.sum()) < np.repeat(starts + contexts, sizes)


def _shared(field: pa.Field) -> pa.Field:
    if pa.types.is_string(field.type):
        return pa.field(field.name, pa.dictionary(pa.int32(), pa.string()))
    return field


def _spread(column: pa.Array, parents: np.ndarray) -> pa.Array:
    """Return the values of lists, null for each token of an episode without a list."""
    present = column.is_valid().to_numpy(zero_copy_only=False)[parents]
    indexes = np.cumsum(present) - 1
    return column.flatten().take(pa.array(indexes, mask=~present))
