"""Columns of the table of episodes, with their Arrow types."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from replaydb.analysis.arrow import TIME
from replaydb.domain import checks
from replaydb.errors import InvalidInputError

_INT, _FLOAT, TEXT = pa.int64(), pa.float64(), pa.string()

#: Columns of the group, with their types.
GROUP = {
    "group_id": _INT, "buffer_name": TEXT, "run_name": TEXT, "run_lineage": TEXT,
    "task_name": TEXT, "group_uid": TEXT, "prompt_uid": TEXT, "group_status": TEXT,
    "leased_from": TEXT, "status_reason": TEXT, "staleness": _INT, "priority": _FLOAT,
    "tags": TEXT, "num_episodes": _INT, "expected_episodes": _INT, "reward_mean": _FLOAT,
    "reward_std": _FLOAT, "times_sampled": _INT, "created_at": TIME, "completed_at": TIME,
    "prompt": TEXT,
}  # fmt: skip
EPISODE = {
    "position": _INT, "reward": _FLOAT, "advantage": _FLOAT, "finish_reason": TEXT,
    "num_tokens": _INT, "num_loss_tokens": _INT, "num_turns": _INT, "prompt_length": _INT,
    "policy_version": _INT, "min_policy_version": _INT, "max_policy_version": _INT,
    "metadata": TEXT, "text": TEXT,
}  # fmt: skip
TOKENS = {
    "token_ids": pa.int32(), "loss_mask": pa.bool_(), "logprobs": pa.float32(),
    "token_versions": pa.int32(), "token_rewards": pa.float32(),
}  # fmt: skip
#: Numpy dtypes by Arrow type. The function of Arrow for this would import pandas.
DTYPES = {pa.from_numpy_dtype(np.dtype(code)): np.dtype(code) for code in "?bBhHiIlLefd"}
ARRAY = pa.struct(
    {
        "name": TEXT, "dtype": TEXT, "shape": pa.list_(_INT), "data": pa.binary(),
        "counts": pa.list_(_INT),
    }.items()
)  # fmt: skip
TURN = pa.struct(
    {
        "num_tokens": _INT, "prompt_length": _INT, "reward": _FLOAT, "policy_version": _INT,
        "token_versions": pa.list_(pa.int32()), "has_logprobs": pa.bool_(),
        "has_token_rewards": pa.bool_(), "finish_reason": TEXT, "metadata": TEXT,
        "token_extras": pa.list_(TEXT), "parent": _INT, "shared": _INT,
        "short_extras": pa.list_(TEXT), "context_extras": pa.list_(ARRAY),
        "uid": TEXT, "agent": TEXT, "state": TEXT, "is_discarded": pa.bool_(),
    }.items()
)  # fmt: skip
LISTS = {
    "turns": TURN, "token_extras": ARRAY, "extras": ARRAY,
    "group_prompt_ids": pa.int32(), "group_extras": ARRAY,
}  # fmt: skip


def episode_schema(extras: Mapping[str, str] | None = None) -> pa.Schema:
    """Return the schema of rows of episodes; requested extras are its last columns.

    Raises:
        InvalidInputError: `extras` is not a mapping of names to dtypes, or a name is taken.
    """
    lists = {name: pa.list_(kind) for name, kind in (TOKENS | LISTS).items()}
    known = GROUP | EPISODE | lists
    if not isinstance(extras, Mapping | None):
        raise InvalidInputError("extras", "a mapping of names to dtypes", repr(extras))
    for name, dtype in (extras or {}).items():
        if checks.name("extras", name) in known:
            raise InvalidInputError("extras", "names that differ from other columns", repr(name))
        try:
            kind = pa.from_numpy_dtype(np.dtype(dtype))
        except (TypeError, pa.ArrowNotImplementedError):
            kind = None
        if kind not in DTYPES:
            expected = "the name of a numeric numpy dtype"
            raise InvalidInputError(f"extras[{name!r}]", expected, repr(dtype))
        known[name] = pa.list_(kind)
    return pa.schema(known.items())


def extra_fields(schema: pa.Schema) -> list[pa.Field]:
    """Return the columns of requested extras."""
    return list(schema)[len(GROUP) + len(EPISODE) + len(TOKENS) + len(LISTS) :]
