"""`replaydb import-dataset`: prompts, completions and rewards that were made elsewhere."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from replaydb.cli.console import BufferName, Url, progress, with_store
from replaydb.cli.selecting import check_known
from replaydb.display import printable
from replaydb.errors import InvalidInputError

#: Of the runs that put what comes from datasets.
RUN = "import-dataset"


def import_dataset(
    url: Url,
    source: Annotated[
        Path, typer.Argument(help="A file of JSON lines or Parquet, or a folder of such files.")
    ],
    buffer: BufferName,
    name: Annotated[
        str, typer.Option(help="What it is called in the buffer: rows of a name are put once.")
    ],
    task: Annotated[
        str | None, typer.Option(help="Task of its groups; by default the name.")
    ] = None,
    tag: Annotated[list[str] | None, typer.Option(help="A column that becomes a tag.")] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="A tokenizer of Hugging Face, a folder, for rows without tokens."),
    ] = None,
    create: Annotated[
        bool, typer.Option("--create", help="Make the buffer if it is not there.")
    ] = False,
) -> None:
    """Put rows of prompts, completions and rewards into a buffer; run again, it goes on."""
    from replaydb import blocking
    from replaydb.errors import NotSupportedError

    try:
        from replaydb.integrations.datasets import put_dataset

        read = None if tokenizer is None else _tokenizer(tokenizer)
    except ImportError as error:
        raise NotSupportedError(
            f"to read datasets, {error.name} is needed: pip install {error.name}"
        ) from error
    rows = _dataset(source)
    with_store(url, lambda store: check_known(store, [] if create else [buffer]))
    with progress("rows") as bar, blocking.Store.open(url, migrate=False, run=RUN) as store:
        target = store.buffer(buffer, create=create)
        before = target.cursor(name=f"dataset/{name}") or 0
        num_groups = put_dataset(
            target,
            rows,
            name,
            task_name=task,
            tokenizer=read,
            tags=tag or (),
            progress=bar,
        )
    known = f"; {before} rows of {printable(name)} had been put before" if before else ""
    typer.echo(f"{num_groups} groups put{known}")


def _dataset(source: Path) -> Any:
    """The rows of files, one after another, no more of them in memory than a few."""
    from datasets import IterableDataset

    inside = sorted(one for one in source.rglob("[!.]*") if one.is_file())
    files = [source] if source.is_file() else inside
    if not files or not {one.suffix for one in files} <= _READERS.keys():
        expected = f"files that are there, and end in {' or '.join(_READERS)}"
        raise InvalidInputError("source", expected, source)
    return IterableDataset.from_generator(_rows, gen_kwargs={"files": files})


def _rows(files: Sequence[Path]) -> Iterator[Any]:
    for file in files:
        yield from _READERS[file.suffix](file)


def _lines(file: Path) -> Iterator[Any]:
    from replaydb.exchange.formats import lines_of

    for where, line in lines_of(file, file.name):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InvalidInputError(where, "JSON", error) from error
        if not isinstance(row, dict):
            raise InvalidInputError(where, "an object", row)
        yield row


def _parquet(file: Path) -> Iterator[Any]:
    from pyarrow import ArrowException

    from replaydb.exchange.parquet import batches_of

    try:
        for batch in batches_of(file, file.name):
            yield from batch.to_pylist()
    except InvalidInputError:
        raise
    except (ArrowException, ValueError, KeyError) as error:
        raise InvalidInputError("source", "a file of Parquet", f"{file.name}: {error}") from error


_READERS = {".jsonl": _lines, ".parquet": _parquet}


def _tokenizer(path: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except Exception as error:  # what it raises has no type of its own
        raise InvalidInputError("tokenizer", "a tokenizer of Hugging Face", path) from error
