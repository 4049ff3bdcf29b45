"""Small files that expand too far are refused before memory is allocated."""

from __future__ import annotations

import errno
import subprocess
import sys
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from replaydb.analysis.episode_columns import episode_schema
from replaydb.analysis.episode_rows import batch_of_episodes
from replaydb.domain.episodes import EpisodeGroup
from replaydb.errors import InvalidInputError, NotSupportedError, PayloadsUnavailableError
from replaydb.exchange import formats, parquet
from replaydb.exchange.formats import ParquetWriter, names_of, rows_of
from replaydb.exchange.parquet import batches_of, described_bytes
from replaydb.exchange.regrouping import groups_in
from support.decoded import decoded_group
from support.groups import episode

#: Imports each file, in a process whose peak memory it prints, in MiB.
IMPORT = """
import resource, sys
from replaydb import InvalidInputError, blocking
from replaydb.exchange import import_groups

url, *paths = sys.argv[1:]
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
blocking.Store.open(url).close()
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before = peak()
for path in paths:
    try:
        import_groups(url, path, buffer="math", create=True)
    except InvalidInputError as error:
        assert "expands to at most 67108864 bytes" in str(error), error
    else:
        raise AssertionError(path)
print((peak() - before) >> 10)
"""

UID = pa.array(["a"])


def repeated(text: str, count: int) -> pa.Array:
    """Return a dictionary array of one repeated text."""
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(count, np.int32)), [text])


def one_list(values: Any) -> pa.Array:
    """Return an array with one list."""
    return pa.ListArray.from_arrays(pa.array([0, len(values)], pa.int32()), values)


def varint(number: int, num_bytes: int | None = None) -> bytes:
    """Return a Thrift integer, in more bytes than it needs if wanted."""
    found: list[int] = []
    number *= 2
    while number > 127 or len(found) + 1 < (num_bytes or 0):
        found.append(number & 127 | 128)
        number >>= 7
    return bytes([*found, number])


def restate(path: Path, numbers: dict[int, int]) -> None:
    """Replace numbers in the footer of a file."""
    content = path.read_bytes()
    begin = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    footer = content[begin:]
    for old, new in numbers.items():
        assert varint(old) in footer
        footer = footer.replace(varint(old), varint(new, len(varint(old))))
    path.write_bytes(content[:begin] + footer)


def bombs(folder: Path) -> list[Path]:
    """Write files of a few kilobytes, each of which expands to between 1 GB and terabytes."""
    text = "x" * 10_000_000
    number = 100_000_000
    tables: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        # Equal values stored as counts, in one row.
        "lists": ({"group_uid": UID, "loss_mask": one_list(pa.array(np.zeros(number, bool)))}, {}),
        "nulls": ({"group_uid": UID, "turns": one_list(pa.nulls(number // 10, pa.struct(
            {"num_tokens": pa.int64(), "metadata": pa.string()}.items())))}, {}),
        # A text in a dictionary, in many rows: in a column of names, and in a nested column.
        "names": ({"group_uid": repeated(text, 100_000)}, {"dictionary_pagesize_limit": 2**30}),
        "texts": ({"group_uid": UID, "extras": one_list(pa.StructArray.from_arrays(
            [repeated(text, 100_000)], ["data"]))}, {"dictionary_pagesize_limit": 2**30}),
        # Zeros in a compressed page.
        "pages": ({"group_uid": UID, "text": pa.array(["\0" * 200_000_000])},
                  {"use_dictionary": False, "write_statistics": False}),
    }  # fmt: skip
    # Arrow believes the pages.
    tables["footer"] = tables["lists"]
    for name, (columns, options) in tables.items():
        path = folder / f"{name}.parquet"
        pq.write_table(pa.table(columns), path, compression="zstd", **options)
        assert path.stat().st_size < 64_000, name
    restate(folder / "footer.parquet", {number: 1, 12_500_062: 100})
    chunk = pq.read_metadata(folder / "footer.parquet").row_group(0).column(1)
    assert (chunk.num_values, chunk.total_uncompressed_size) == (1, 100)
    return sorted(folder.glob("*.parquet"))


def test_small_files_do_not_take_gigabytes(tmp_path: Path) -> None:
    paths = bombs(tmp_path)
    assert len(paths) == 6
    url = f"sqlite:///{tmp_path / 'store.db'}"
    outcome = subprocess.run(
        [sys.executable, "-c", IMPORT, url, *map(str, paths)], capture_output=True, text=True
    )
    assert outcome.returncode == 0, outcome.stderr
    assert int(outcome.stdout) < 300


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("compression", ["none", "snappy", "zstd"])
@pytest.mark.parametrize("use_dictionary", [True, False])
def test_rows_match_the_file(
    tmp_path: Path, version: str, compression: str, use_dictionary: bool
) -> None:
    nested = pa.list_(pa.struct({"name": pa.large_string(), "shape": pa.list_(pa.int64())}.items()))
    table = pa.table(
        {
            "text": ["one", None, "one", "three"] * 3000,
            "flag": [True, False, None, True] * 3000,
            "number": pa.array(np.arange(12_000, dtype=np.float32)),
            "fixed": pa.array([b"abcd", None, b"efgh", b"ijkl"] * 3000, pa.binary(4)),
            "lists": pa.array([[], None, [1, None], [2]] * 3000, pa.list_(pa.int32())),
            "nested": pa.array(
                [[], None, [{"name": "x", "shape": [1]}], [{"name": None}]] * 3000, nested
            ),
            "map": pa.array([[("a", "b")], [], None, []] * 3000, pa.map_(pa.string(), pa.string())),
        }
    )
    path = tmp_path / "file"
    pq.write_table(
        table, path, data_page_version=version, compression=compression,
        use_dictionary=use_dictionary, row_group_size=5000, data_page_size=1000,
    )  # fmt: skip
    batches = list(batches_of(path, "some.parquet"))
    assert len(batches) > 10
    assert pa.Table.from_batches(batches).cast(table.schema).equals(table)
    some = pa.Table.from_batches(batches_of(path, "some.parquet", ["lists", "text", "other"]))
    assert some.cast(table.select(["text", "lists"]).schema).equals(table.select(["text", "lists"]))


def test_rows_are_read_by_their_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    pq.write_table(pa.table({"text": [f"{i}" * 1000 for i in range(10)]}), path)
    assert [len(batch) for batch in batches_of(path, "some.parquet")] == [10]
    monkeypatch.setattr(parquet, "READ_BYTES", 3000)
    assert max(len(batch) for batch in batches_of(path, "some.parquet")) <= 3


def test_rows_of_unequal_size_are_read_by_their_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch of text that is too large for an Arrow column would be called an invalid file."""
    path = tmp_path / "file"
    table = pa.table({"text": ["x"] * 50 + [f"{i}" * 1000 for i in range(10)] + [None] * 5})
    pq.write_table(table, path)
    monkeypatch.setattr(parquet, "READ_BYTES", 6000)
    batches = list(batches_of(path, "some.parquet"))
    assert pa.Table.from_batches(batches).equals(table)
    assert max(len(batch) for batch in batches) > 10
    assert max(batch["text"].nbytes for batch in batches) < 7000


@pytest.mark.parametrize("error", [MemoryError(), PermissionError(errno.EACCES, "no")])
def test_an_error_of_this_machine_is_not_one_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object) -> Iterator[pa.RecordBatch]:
        raise error

    for name in ("batches_of", "lines_of"):
        monkeypatch.setattr(formats, name, fail)
    for read in (names_of, rows_of):
        for name in ("some.parquet", "some.jsonl"):
            with pytest.raises((MemoryError, PayloadsUnavailableError)):
                list(read(tmp_path / "file", name))


def test_an_import_accepts_every_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that compress too well are stored without compression."""
    monkeypatch.setattr(parquet, "FREE_EXPANSION_BYTES", 0)
    monkeypatch.setattr(parquet, "MAX_EXPANSION_RATIO", 50)
    one = EpisodeGroup("math", [episode(1.0, text="again and again " * 1000)] * 100)
    batch = batch_of_episodes(episode_schema(), [decoded_group(one)])
    path, other = tmp_path / "some.parquet", tmp_path / "other.parquet"
    pq.write_table(pa.Table.from_batches([batch]), other, compression="zstd")
    with pytest.raises(InvalidInputError, match=r"some\.parquet: expected a file that expands to"):
        list(rows_of(other, "some.parquet"))
    writer = ParquetWriter(path, episode_schema())
    writer.write(batch)
    writer.close()
    [found] = groups_in(rows_of(path, "some.parquet"), "some.parquet")
    assert found.group == one
    assert sorted(tmp_path.iterdir()) == [other, path]


@pytest.mark.parametrize("settings", ["", "PARQUET_VERSION v2, "])
def test_files_of_duckdb(tmp_path: Path, settings: str) -> None:
    """Version 2 uses another encoding for distinct texts."""
    path = tmp_path / "file"
    rows = (
        "SELECT 'g' || i AS group_uid, 'math' AS task_name, [i] AS token_ids FROM range(500) r(i)"
    )
    duckdb.sql(f"COPY ({rows}) TO '{path}' (FORMAT parquet, {settings}COMPRESSION zstd)")
    found = pa.Table.from_batches(batches_of(path, "some.parquet"))
    assert found["group_uid"].to_pylist() == [f"g{i}" for i in range(500)]
    assert found["task_name"].to_pylist() == ["math"] * 500
    assert names_of(path, "some.parquet")


def test_dictionary_text_counts_each_time(tmp_path: Path) -> None:
    path = tmp_path / "file"
    text = "CASE WHEN i < 4096 THEN repeat('x', 100000) ELSE 'g' || i END"
    rows = f"FROM range(8192) r(i) SELECT {text} AS group_uid"
    settings = "FORMAT parquet, PARQUET_VERSION v2, COMPRESSION zstd, ROW_GROUP_SIZE 2048"
    duckdb.sql(f"COPY ({rows}) TO '{path}' ({settings})")
    metadata = pq.read_metadata(path)
    encodings = {metadata.row_group(i).column(0).encodings for i in range(metadata.num_row_groups)}
    assert encodings == {("RLE_DICTIONARY",), ("DELTA_LENGTH_BYTE_ARRAY",)}
    assert described_bytes(path, metadata, 2**40) < 4096 * 100_000
    with pytest.raises(InvalidInputError, match=r"some\.parquet: expected a file that expands to"):
        list(batches_of(path, "some.parquet"))


@pytest.mark.parametrize("kind", ["list", "struct", "fixed_size_list", "map"])
def test_nested_text_counts_by_its_own_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A dictionary with one long text and short ones, each of which is in many rows."""
    path = tmp_path / "file"
    texts = pa.array(["x" * 100_000, *["y", "z"] * 5000])
    nested = {
        "list": pa.ListArray.from_arrays(pa.array(range(10_002), pa.int32()), texts),
        "struct": pa.StructArray.from_arrays([texts], ["name"]),
        "fixed_size_list": pa.FixedSizeListArray.from_arrays(texts, 1),
        "map": pa.MapArray.from_arrays(pa.array(range(10_002), pa.int32()), texts, texts),
    }[kind]
    table = pa.table({"extras": nested})
    pq.write_table(table, path, compression="zstd")
    found = pa.concat_arrays(batch["extras"] for batch in batches_of(path, "some.parquet"))
    assert found.to_pylist() == nested.to_pylist()
    monkeypatch.setattr(parquet, "MAX_EXPANSION_RATIO", 0)
    monkeypatch.setattr(parquet, "described_bytes", lambda *_: 0)
    limit = 2 if kind == "map" else 1  # keys and values
    monkeypatch.setattr(parquet, "FREE_EXPANSION_BYTES", limit * 110_000)
    list(batches_of(path, "some.parquet"))
    monkeypatch.setattr(parquet, "FREE_EXPANSION_BYTES", limit * 110_000 - 1)
    with pytest.raises(InvalidInputError, match=f"one of {limit * 110_000} or more"):
        list(batches_of(path, "some.parquet"))


def test_a_dictionary_that_the_footer_does_not_mention_is_refused(tmp_path: Path) -> None:
    """Its text would be decoded as it is read."""
    path = tmp_path / "file"
    pq.write_table(pa.table({"group_uid": ["a", "b"]}), path, write_statistics=False)
    chunk = pq.read_metadata(path).row_group(0).column(0)
    data, dictionary = varint(chunk.data_page_offset), varint(chunk.dictionary_page_offset)
    content = path.read_bytes()
    # A field begins with the distance of its number from the number before: 2 from 9 to 11.
    offsets = b"\x26" + data + b"\x26" + dictionary
    moved = b"\x26" + varint(chunk.dictionary_page_offset, len(data)) + b"\x16" + dictionary
    assert content.count(offsets) == 1
    path.write_bytes(content.replace(offsets, moved))
    assert not pq.read_metadata(path).row_group(0).column(0).has_dictionary_page
    with pytest.raises(InvalidInputError, match="a dictionary of group_uid that the footer does"):
        list(rows_of(path, "some.parquet"))


def test_text_that_hides_its_size_is_refused(tmp_path: Path) -> None:
    """In this encoding, each text may repeat the one before at no cost."""
    path = tmp_path / "file"
    table = pa.table({"group_uid": ["x" * 1000] * 1000})
    pq.write_table(
        table, path, use_dictionary=False, column_encoding={"group_uid": "DELTA_BYTE_ARRAY"}
    )
    for read in (names_of, rows_of):
        with pytest.raises(InvalidInputError, match="group_uid in the encoding DELTA_BYTE_ARRAY"):
            list(read(path, "some.parquet"))


def test_pages_that_contradict_the_footer_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    pq.write_table(pa.table({"group_uid": ["a", "b"]}), path)
    content = path.read_bytes()
    metadata = pq.read_metadata(path)
    begin = metadata.row_group(0).column(0).dictionary_page_offset
    # The first byte of a page header is the kind of its first field, which is never a list.
    for damage in (b"\x19", b"\x00", b"\x1c"):
        path.write_bytes(content[:begin] + damage + content[begin + 1 :])
        with pytest.raises(InvalidInputError, match=r"some\.parquet: expected a file with rows"):
            list(rows_of(path, "some.parquet"))


def test_a_repeated_part_of_a_page_header_adds_to_the_first() -> None:
    """As Arrow reads it: the number of values may be in the first, and all else in the second."""
    first, second = b"\x15" + varint(10**6) + b"\0", b"\x25" + varint(3) + b"\0"
    header = b"\x5c" + first + b"\x0c" + varint(5) + second + b"\0"
    assert parquet._struct(BytesIO(header)) == {5: {1: 10**6, 2: 3}}


def test_a_line_that_no_import_reads_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "MAX_LINE", 2000)
    one = EpisodeGroup("math", [episode(), episode(text="x" * 2000)])
    batch = batch_of_episodes(episode_schema(), [decoded_group(one)])
    writer = formats.JsonlWriter(tmp_path / "file", episode_schema())
    with pytest.raises(NotSupportedError, match=r"group 1, episode 1: \d+ characters.*Parquet"):
        writer.write(batch)
    writer.close()


@pytest.mark.parametrize("content", ["x" * 99, '{"group_uid": "a"}\n' + "x" * 99])
def test_a_line_is_not_read_whole_if_it_is_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    monkeypatch.setattr(formats, "MAX_LINE", 40)
    (tmp_path / "file").write_text(content)
    for read in (names_of, rows_of):
        with pytest.raises(InvalidInputError, match=r"line \d: expected at most 40 characters"):
            list(read(tmp_path / "file", "some.jsonl"))
