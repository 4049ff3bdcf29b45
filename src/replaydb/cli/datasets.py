"""`replaydb import-dataset`: put existing prompts, completions and rewards into a buffer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from replaydb.cli.console import BufferName, Url, progress, with_store
from replaydb.cli.selecting import check_known
from replaydb.errors import InvalidInputError
from replaydb.util.display import printable

#: Name of the run that puts groups from datasets.
RUN = "import-dataset"


def import_dataset(
    url: Url,
    source: Annotated[
        Path, typer.Argument(help="JSON Lines or Parquet file, or a folder of such files.")
    ],
    buffer: BufferName,
    name: Annotated[
        str,
        typer.Option(help="Dataset name. Rows already imported under this name are skipped."),
    ],
    task: Annotated[
        str | None, typer.Option(help="Task of the groups (default: the dataset name).")
    ] = None,
    tag: Annotated[
        list[str] | None, typer.Option(help="Column to store as a tag (repeatable).")
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="Folder of a Hugging Face tokenizer, for rows without tokens."),
    ] = None,
    create: Annotated[
        bool, typer.Option("--create", help="Create the buffer if it does not exist.")
    ] = False,
) -> None:
    """Put rows of prompts, completions and rewards into a buffer. Rerun to resume."""
    from replaydb import blocking
    from replaydb.errors import NotSupportedError

    with_store(url, lambda store: check_known(store, [] if create else [buffer]))
    try:
        from replaydb.integrations.datasets import put_dataset

        read = None if tokenizer is None else _tokenizer(tokenizer)
    except ImportError as error:
        raise NotSupportedError(
            f"to read datasets, {error.name} is needed: pip install {error.name}"
        ) from error
    rows = _dataset(source)
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
    known = f"; skipped {before} rows of {printable(name)} put before" if before else ""
    typer.echo(f"put {num_groups} groups{known}")


def _dataset(source: Path) -> Any:
    """Return the rows of files as a dataset that streams them."""
    from datasets import IterableDataset

    inside = sorted(one for one in source.rglob("[!.]*") if one.is_file())
    files = [source] if source.is_file() else inside
    if not files or not {one.suffix for one in files} <= _READERS.keys():
        expected = f"an existing file or folder with files {' or '.join(_READERS)} only"
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
            raise InvalidInputError(where, "a JSON object", row)
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
        raise InvalidInputError("source", "a Parquet file", f"{file.name}: {error}") from error


_READERS = {".jsonl": _lines, ".parquet": _parquet}


def _tokenizer(path: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except Exception as error:  # transformers raises errors of many types
        raise InvalidInputError("tokenizer", "a Hugging Face tokenizer", path) from error
