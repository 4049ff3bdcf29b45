"""Random changes of payloads, filters and files that keep enough of their structure to get deep."""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from io import BytesIO
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from fuzz.targets import CORPUS
from replaydb.database.filters.group_columns import COLUMNS
from replaydb.database.filters.parsing import _METHODS
from replaydb.database.filters.terms import FUNCTIONS

#: Names of tensors of payload format 2 begin so, beside the name of a column.
_PREFIXES = "rows/", "begins/", "missing/", "~1/", "~2/", "token/", "episode/", "joint/", "group/"

Mutate = Callable[[bytes, Random], bytes]

_INTEGERS = [
    edge + step
    for bits in (0, 3, 7, 8, 15, 16, 31, 32, 53, 62, 63, 64, 70)
    for edge in (2**bits, -(2**bits))
    for step in (-1, 0, 1)
]
_FLOATS = [0.0, -0.0, 0.5, 1e-40, -3.4e38, math.nan, math.inf, -math.inf]
_NUMBERS = [*_INTEGERS, *_FLOATS, 1e-300, 3.5e38, -1e300]
_TEXTS = [
    "", "a", "a" * 256, "a" * 5000, "\0", "\ud800", "\udc00\ud800", "␛0000", "␛241b", "\ufeff",
    "\r", "\u2028", "é", "😀", "NaN", "Infinity", "0x7fc00001", "0x7f800000", "AA==", "null", "{}",
    '{"a": NaN}', "[" * 2000, "2026-01-01", "completed", "archived", "leased", "int8", "bfloat16",
    "float8_e4m3fn", "bool", "F64", "I64", "BF16", "BOOL", "U8", "token/a", "each/0/token/a",
    "group/a", "turn/counts", "json", "token_rewards", "__metadata__", "segments", "joint/a",
    "joint/policy_version", "turn/parents", "turn/discarded", "turn_uids", "turn_agents",
    "turn_states", "U64",
]  # fmt: skip
_TOKENS = [
    *COLUMNS, *FUNCTIONS, *(f".{name}" for name in _METHODS), "tags", "col.", "rdb.col.", "None",
    "True", "False", "and", "or", "not", "in", "is", "is not", "not in", "if", "else", "lambda",
    "==", "!=", "<", "<=", ">", ">=", "+", "-", "*", "/", "%", "**", "//", "|", "&", "~", "^", ":=",
    "(", ")", "[", "]", "{", "}", ",", ":", ".", "...", "#", "\\", "\n", "\0", "\x0c", "0", "1",
    "-1", "0.5", "1e308", "1e999", "1j", "9223372036854775808", "0x1F", "1_000", "'a'", '"hard"',
    "''", "b'a'", "f'{id}'", "'%\\\\_'", "'\\ud800'", "'\\0'", "'2026-01-01'", "'0001-01-01'",
    "'9999-12-31T23:59-23:59'", "'level'", "'n'", "\ud800", "é", "\u2170d", "tags['level']",
    "tags['spec']['langs'][0]", "tags['spec', 0]", ".like('%a_')", ".as_float()", "['a', 1]",
]  # fmt: skip


def mutate_bytes(data: bytes, random: Random) -> bytes:
    """Overwrite, insert, remove or repeat some bytes."""
    changed = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 4))):
        begin = random.randrange(len(changed) + 1)
        end = min(len(changed), begin + random.choice((1, 1, 2, 4, 8, 32)))
        match random.randrange(5):
            case 0:
                changed[begin:end] = random.randbytes(end - begin)
            case 1 if begin < end:
                changed[begin] ^= 1 << random.randrange(8)
            case 2:
                del changed[begin:end]
            case 3:
                changed[begin:begin] = changed[begin:end] * random.choice((1, 2, 50))
            case _:
                size = random.choice((1, 2, 4, 8))
                number = random.choice(_INTEGERS) % 2 ** (8 * size)
                changed[begin : begin + size] = number.to_bytes(size, "little")
    return bytes(changed)


def mutate_json(value: Any, random: Random) -> Any:
    """Change one of the values in a JSON value, in place if it has others in it."""
    places: list[tuple[Any, Any]] = []
    _collect(value, places)
    if not places:
        return _other(value, random)
    owner, key = random.choice(places)
    match random.randrange(6):
        case 0:
            del owner[key]
        case 1:
            source, other = random.choice(places)
            owner[key] = json.loads(json.dumps(source[other]))
        case 2 if isinstance(owner, list):
            owner[key:key] = owner[key : key + 1] * random.choice((1, 2, 30))
        case 2:
            owner[random.choice([*_TEXTS, *owner])] = owner.pop(key)
        case _:
            owner[key] = _other(owner[key], random)
    return value


def _collect(value: Any, places: list[tuple[Any, Any]]) -> None:
    keys = (
        list(value) if isinstance(value, dict) else range(len(value) if type(value) is list else 0)
    )
    for key in keys:
        places.append((value, key))
        _collect(value[key], places)


def _other(value: Any, random: Random) -> Any:
    """Return a value to take the place of another, often of the same type."""
    match random.randrange(5), value:
        case 0 | 1, bool():
            return not value
        case 0 | 1, int():
            return value + random.choice((-1, 1, 2**31, 2**63))
        case 0, str() if value:
            at = random.randrange(len(value))
            return value[:at] + random.choice(_TEXTS) + value[at + random.randrange(2) :]
        case 0 | 1, list():
            return value * 2 if value else [0]
        case 2, _:
            return random.choice(_TEXTS)
        case 3, _:
            return random.choice(_NUMBERS)
    return random.choice((None, True, [], {}, [[]], [None], {"a": [{}]}, [[[[0] * 9]]]))


def to_json(value: Any, random: Random) -> bytes:
    """Return JSON in one of several spellings, some of them invalid."""
    text = json.dumps(value, ensure_ascii=bool(random.randrange(2)))
    match random.randrange(24):
        case 0:
            text = text.replace(":", random.choice((":1e999,", ": NaN, ", ":-0,", ": ")), 1)
        case 1:
            text = text.replace("{", random.choice(('{"a":1,"a":2,', "{{", "[", " {")), 1)
    return text.encode("utf-8", "surrogatepass")


def mutate_payload(data: bytes, random: Random) -> bytes:
    """Change tensors of a payload, its header, or its JSON, and compute its lengths again."""
    if not random.randrange(8):
        return mutate_bytes(data, random)
    if data[:4] == zstandard.FRAME_HEADER:
        plain = zstandard.ZstdDecompressor().decompress(data, max_output_size=2**20)
        return bytes(zstandard.ZstdCompressor().compress(mutate_payload(plain, random)))
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    body = {
        name: data[end:][slice(*spec["data_offsets"])]
        for name, spec in header.items()
        if name != "__metadata__"
    }
    name = random.choice(list(body))
    spec, content = header[name], body[name]
    match random.randrange(9):
        case 0:
            _mutate_header(header, random)
        case 1:
            others = "logprobs", "token_versions", "turn/token_rewards", "token/token_rewards"
            prefixed = [prefix + one for prefix in _PREFIXES for one in body]
            other = random.choice([*_TEXTS, *body, *others, *prefixed])
            header[other], body[other] = header.pop(name), body.pop(name)
        case 2:
            del header[name], body[name]
        case 3:
            spec["dtype"] = random.choice(("BOOL", "U8", "I32", "I64", "F16", "F32", "F64", "BF16"))
            shapes = ([len(content)], [0], [1, len(content) // 4], [2, -1])
            spec["shape"] = random.choice(shapes)
        case 4:
            other = random.choice(_PREFIXES) + name
            count = random.choice((0, 1, 2, *spec["shape"][:1]))
            body[other] = struct.pack(f"<{count}q", *random.choices(range(-1, 6), k=count))
            header[other] = {"dtype": "I64", "shape": [count]}
        case _ if name == "json":
            body[name] = to_json(mutate_json(json.loads(content), random), random)
        case _ if content:
            body[name] = _mutate_numbers(content, spec["dtype"], random)
    return _payload(header, body)


def _mutate_header(header: Any, random: Random) -> None:
    """Change a value of the header, or of the description of the columns in it."""
    notes = header["__metadata__"]
    if "columns" in notes and random.randrange(2):
        text = to_json(mutate_json(json.loads(notes["columns"]), random), random)
        notes["columns"] = text.decode("utf-8", "surrogatepass")
    else:
        mutate_json(header, random)


def _mutate_numbers(content: bytes, dtype: str, random: Random) -> bytes:
    """Change a number of a tensor."""
    size = {"I64": 8, "F64": 8, "I32": 4, "F32": 4}.get(dtype, 1)
    at = random.randrange(len(content)) // size * size
    kind = {"F64": "<d", "F32": "<f"}.get(dtype)
    if kind and random.randrange(2):
        number = struct.pack(kind, random.choice(_FLOATS))
    else:
        some = random.choice((_INTEGERS, range(-2, 50)))
        number = (random.choice(some) % 2 ** (8 * size)).to_bytes(size, "little")
    return content[:at] + number + content[at + size :]


def _payload(header: Any, body: dict[str, bytes]) -> bytes:
    end = 0
    for name, content in body.items():
        if isinstance(header.get(name), dict):
            header[name]["data_offsets"] = [end, end + len(content)]
            if name == "json":
                header[name]["shape"] = [len(content)]
        end += len(content)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + b"".join(body.values())


def mutate_filter(data: bytes, random: Random) -> bytes:
    """Change tokens of a filter."""
    text = data.decode("utf-8", "surrogateescape")
    tokens: list[str] = re.findall(r"\s+|\w+|'[^']*'|\"[^\"]*\"|[=!<>]=|.", text, re.DOTALL)
    for _ in range(random.choice((1, 1, 2, 3))):
        at = random.randrange(len(tokens) + 1)
        end = min(len(tokens), at + random.choice((1, 1, 1, 3, 6)))
        new = random.choice(_TOKENS)
        match random.randrange(6):
            case 0 | 1:
                tokens[at:end] = [new]
            case 2:
                tokens[at:at] = [" ", new, " "]
            case 3:
                del tokens[at:end]
            case 4:
                tokens[at:at] = tokens[at:end] * random.choice((1, 1, 20))
            case _:
                tokens[at:end] = [
                    "(",
                    *tokens[at:end],
                    ")",
                    random.choice((" and ", " + ", "")),
                    new,
                ]
    return "".join(tokens).encode("utf-8", "surrogatepass")


def mutate_lines(data: bytes, random: Random) -> bytes:
    """Change lines of JSON, or values in one of them."""
    lines = data.split(b"\n")
    at = random.randrange(len(lines))
    match random.randrange(16):
        case 0:
            return mutate_bytes(data, random)
        case 1:
            lines[at:at] = lines[at : at + 1]
        case 2:
            del lines[at]
        case 3:
            random.shuffle(lines)
        case 4:
            lines[at] = random.choice((b"\xef\xbb\xbf", b" ", b"\r", b"\0")) + lines[at]
        case 5:
            return random.choice((b"\r", b"\r\n", b"\x0c\n", b"\n\n")).join(lines)
        case _:
            lines[at] = to_json(mutate_json(json.loads(lines[at]), random), random)
    return b"\n".join(lines)


def mutate_parquet(data: bytes, random: Random) -> bytes:
    """Write changed rows in another form, or change bytes of pages or of the footer."""
    if random.randrange(3):
        return _mutate_pages(data, random)
    table = pq.read_table(BytesIO(data))
    if table.nbytes > 2**20:
        return data
    sink = BytesIO()
    pq.write_table(
        _changed_table(table, random),
        sink,
        compression=random.choice(("none", "snappy", "gzip", "zstd", "lz4", "brotli")),
        use_dictionary=bool(random.randrange(2)),
        row_group_size=random.choice((None, 1, 2)),
        data_page_version=random.choice(("1.0", "2.0")),
        data_page_size=random.choice((None, 1, 100)),
        write_statistics=bool(random.randrange(2)),
        store_schema=bool(random.randrange(2)),
    )
    return sink.getvalue()


def _changed_table(table: pa.Table, random: Random) -> pa.Table:
    name = random.choice(table.column_names)
    at, kind = table.column_names.index(name), table[name].type
    match random.randrange(6):
        case 0:
            return table.drop_columns([name])
        case 1:
            return table.take([random.randrange(len(table)) for _ in range(len(table) + 1)])
        case 2:
            kinds = pa.int8(), pa.uint64(), pa.float16(), pa.string(), pa.binary(), pa.date32()
            return table.set_column(at, name, table[name].cast(random.choice(kinds)))
        case 3:
            names = table.column_names
            names[at] = random.choice([*names, *_TEXTS])
            return table.rename_columns(names)
        case 4:
            kind = None  # the one that fits the values
    column = mutate_json(table[name].to_pylist(), random)
    column += [None] * (len(table) - len(column))
    return table.set_column(at, name, pa.array(column[: len(table)], kind))


def _mutate_pages(data: bytes, random: Random) -> bytes:
    """Change bytes of the pages, or of the footer, whose length is computed again."""
    begin = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    pages, footer = data[4:begin], data[begin:-8]
    match random.randrange(4):
        case 0 | 1:
            footer = mutate_bytes(footer, random)
        case 2:  # the header of the first page
            pages = mutate_bytes(pages[:64], random) + pages[64:]
        case _:
            pages = mutate_bytes(pages, random)
    return b"PAR1" + pages + footer + len(footer).to_bytes(4, "little") + b"PAR1"


MUTATIONS: dict[str, Mutate] = {
    "payload": mutate_payload,
    "filter": mutate_filter,
    "jsonl": mutate_lines,
    "parquet": mutate_parquet,
}


def mutants(name: str, seed: int) -> Iterator[bytes]:
    """Yield changed inputs of a target without end, the same for the same seed and corpus."""
    corpus = [path.read_bytes() for path in sorted((CORPUS / name).iterdir())]
    return mutants_of(name, corpus, Random(f"{name} {seed}"))


def mutants_of(name: str, corpus: Sequence[bytes], random: Random) -> Iterator[bytes]:
    """Yield changed inputs of a target without end."""
    while True:
        data = random.choice(corpus)
        for _ in range(random.choice((1, 1, 2, 3, 5))):
            try:
                data = MUTATIONS[name](data, random)
            except Exception:  # its structure is gone
                data = mutate_bytes(data, random)
        yield data
