"""Write the files of the corpus that mutations begin with.

    PYTHONPATH=tests python -m fuzz.make_corpus

Files named `found-...` are not made here: they are inputs that once found a fault.
"""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from fuzz.targets import CORPUS
from replaydb import Episode, EpisodeGroup, blocking
from replaydb.domain.episodes.context import GroupContext
from replaydb.exchange import export_groups
from replaydb.exchange.formats import Format
from support.groups import GENERATED, conversation, episode
from support.payloads import encode
from support.samples import DTYPES, array_of, sample_branches, sample_episodes, sample_trajectories

FILTERS = {
    "comparisons": "0.25 < reward_mean <= 1e3 and id != 3 or priority == 1",
    "arithmetic": "-reward_mean * 2 - reward_std / num_tokens + 1 > id % 2",
    "missing": "prompt_uid is None or staleness is not None and prompt_uid != None",
    "lists": "prompt_uid in ['p1', 'p2'] and id not in (1, 2) and tags['n'] in {3, 'hard', 0.5}",
    "booleans": "not has_transcript | (has_transcript is False) & ~(id < 3)",
    "times": "created_at < '2999-01-01' and completed_at >= '2998-12-31T23:00-01:00'",
    "between": "created_at.between('2026-01-01', '2027-01-01') or reward_mean.between(-1, 0.5)",
    "patterns": "task_name.like('gsm\\%_') and group_uid.istartswith('A') or tags['a'].like('%')",
    "functions": "coalesce(tags['level'], lower(task_name), '') != upper(nullif(group_uid, 'x'))",
    "lengths": "length(task_name) + abs(reward_min) > 3 and task_name + '-' + group_uid == 'a-b'",
    "tags": "tags['level'] == 'hard' and tags['n'] > 2 and tags['n'] <= 9007199254740993",
    "paths": "tags['spec']['langs'][0] == 'py' or tags['spec', 1, 'a'] is None",
    "kinds": "tags['n'].as_float() > tags['level'].as_integer() or tags['a'].as_boolean()",
    "prefixes": "(rdb.col.reward_mean > col.reward_std) &\n ~(replaydb.col.task_name == 'ß')",
    "methods": "id.in_([1, 2]) and group_status.not_in(['failed']) and prompt_uid.is_not(None)",
}


#: Columns besides `group_uid` that an import needs.
REQUIRED: dict[str, Any] = {"task_name": "t", "token_ids": [1, 2], "loss_mask": [0, 1]}


def payloads() -> dict[str, bytes]:
    """Return payloads with columns of every kind."""
    extras = {dtype: array_of(dtype, (2, 1), seed=i) for i, dtype in enumerate(DTYPES)}
    prompt = [{"role": "user", "content": GENERATED}]
    everything = sample_episodes(), GroupContext.of(prompt, [1, 2], {"image": [[0.5]]})
    versions = Episode(token_ids=[1, 2], loss_mask=[False, True], policy_version=[3, 4])
    own = [
        episode(None, token_extras={"a": [[1]] * 5}),
        episode(extras={"a": 1}, metadata={"k": [1]}),
    ]
    several: dict[str, tuple[Any, ...]] = {
        "empty": ([], GroupContext.of("prompt", None, None)),
        "plain": ([episode(1.0, 3), episode(-0.5, 4)],),
        "versions": ([versions, episode()],),
        "dtypes": ([episode(extras=extras)],),
        "own-extras": (own,),
        "turns": ([conversation(), episode()],),
        "everything": everything,
    }
    found = {name: bytes(encode(*one)) for name, one in several.items()}
    found["compressed"] = bytes(encode(*everything, compression="zstd"))
    for name in ("dtypes", "own-extras", "turns", "everything"):
        found[f"{name}-2"] = bytes(encode(*several[name], version=2))
    found["segments-2"] = bytes(encode(sample_branches(), version=2))
    found["trajectories-2"] = bytes(encode(sample_trajectories(), version=2))
    found["compressed-2"] = bytes(encode(sample_branches(), version=2, compression="zstd"))
    return found


def exports(kind: Format) -> dict[str, bytes]:
    """Return files of an export with groups of every status and form."""
    conversations = [conversation(), episode(None, 3, text=GENERATED)]
    prompt: dict[str, Any] = {"prompt": [{"role": "user"}], "extras": {"image": [[0.5]]}}
    several = {
        "everything": [
            EpisodeGroup("math", sample_episodes(), group_uid="a", tags={"level": "hard"}),
            EpisodeGroup("math", conversations, priority=0.5, group_uid="b", **prompt),
            EpisodeGroup("math", [], status="aborted", group_uid="c", expected_episodes=8),
            EpisodeGroup("math", [episode()], status="archived", group_uid="d", prompt_ids=[7]),
        ],
        "plain": [EpisodeGroup("math", [episode(), episode(0)], group_uid=uid) for uid in "abc"],
        "turns": [EpisodeGroup("math", sample_branches()[:2], group_uid="a")],
        "ragged": [EpisodeGroup("math", sample_branches()[-1:], group_uid="a")],
        "trajectories": [EpisodeGroup("math", sample_trajectories(), group_uid="a")],
    }
    found = {}
    for name, groups in several.items():
        with TemporaryDirectory() as folder:
            url = f"sqlite:///{folder}/store.db"
            with blocking.Store.open(url, run="run") as store:
                store.buffer("math").put(groups)
            export_groups(url, f"{folder}/export", format=kind)
            [path] = Path(folder).rglob(f"*.{kind}")
            found[name] = path.read_bytes()
    return found


def lines() -> dict[str, bytes]:
    """Return JSON Lines in other spellings."""

    def line(uid: str, **others: Any) -> str:
        return json.dumps({"group_uid": uid, **REQUIRED, **others})

    extra = {"name": "x", "dtype": "bfloat16", "shape": [1, 2], "data": "AAEC/w=="}
    of_runs = ["a", "a", "m", "m"], ["b", "a", "m", "m"], ["a", "b", "n", "m"], ["a", "b", "o", "p"]
    found = {
        "required": line("a"),
        "odd-numbers": line("a", logprobs=["NaN", "0xffc00001"], advantage=None, extras=[extra]),
        "windows": f"\ufeff{line('a')}\r\n\r\n{line('b')}",
        "runs": "\n".join(
            line(uid, buffer_name=buffer, run_name=run, run_lineage=lineage)
            for uid, buffer, run, lineage in of_runs
        ),
        "reused": "\n".join(
            line("a", buffer_name="b", group_id=group_id, num_episodes=1) for group_id in (1, 2)
        ),
    }
    return {name: text.encode() for name, text in found.items()}


def tables() -> dict[str, bytes]:
    """Return Parquet files in other forms."""
    rows = pa.table(
        {"group_uid": list("aabbccddeeff"), **{name: [one] * 12 for name, one in REQUIRED.items()}}
    )
    others = {
        "reward": pa.array([1, None], pa.decimal128(5, 2)),
        "prompt_length": pa.array([1.0, 0.0]),
        "logprobs": pa.array([[0.5, None], [0]], pa.large_list(pa.float16())),
        "finish_reason": pa.array(["stop", None], pa.dictionary(pa.int8(), pa.string())),
        "text": pa.array(["x", "y"], pa.large_string()),
        "position": pa.array([1, 0], pa.uint8()),
        "metadata": pa.array([b"{}", None], pa.binary()),
        "created_at": pa.array([0, 1], pa.timestamp("ns")),
        "fixed": pa.array([[1, 2], None], pa.list_(pa.int8(), 2)),
        "map": pa.array([[("a", 1)], []], pa.map_(pa.string(), pa.int64())),
    }
    types = pa.table({**{one.name: rows[one.name][:2] for one in rows.schema}, **others})
    pages = {"row_group_size": 5, "data_page_version": "2.0", "data_page_size": 1}
    encodings = {"group_uid": "DELTA_LENGTH_BYTE_ARRAY", "task_name": "DELTA_BYTE_ARRAY"}
    return {
        "required": _table(rows, compression="none", use_dictionary=False),
        "dictionaries": _table(rows, compression="zstd", **pages),
        "delta": _table(rows, use_dictionary=False, column_encoding=encodings),
        "types": _table(types, compression="gzip"),
    }


def _table(table: pa.Table, **options: Any) -> bytes:
    sink = BytesIO()
    pq.write_table(table, sink, **options)
    return sink.getvalue()


def main() -> None:
    for target, files in {
        "payload": payloads(),
        "filter": {name: text.encode() for name, text in FILTERS.items()},
        "jsonl": exports("jsonl") | lines(),
        "parquet": exports("parquet") | tables(),
    }.items():
        folder = CORPUS / target
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / name).write_bytes(content)


if __name__ == "__main__":
    main()
