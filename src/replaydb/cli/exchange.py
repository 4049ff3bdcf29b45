"""`replaydb export`, `import` and `import-dataset`: groups in files, and other datasets."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from replaydb.cli.console import BufferName, Url, progress, with_store
from replaydb.cli.selecting import (
    Buffers,
    Runs,
    Statuses,
    Tasks,
    Where,
    check_known,
    condition,
)
from replaydb.errors import InvalidInputError, NotSupportedError
from replaydb.util.display import human_size, printable

#: Name of the run that puts groups from datasets.
RUN = "import-dataset"


def export(
    url: Url,
    destination: Annotated[
        str, typer.Argument(help="Folder, s3://BUCKET/PREFIX, gs://... or az://...")
    ],
    buffer: Buffers = None,
    task: Tasks = None,
    status: Statuses = None,
    run: Runs = None,
    where: Where = None,
    jsonl: Annotated[
        bool, typer.Option("--jsonl", help="Write JSON Lines instead of Parquet.")
    ] = False,
    skip_damaged: Annotated[
        bool,
        typer.Option(
            "--skip-damaged", help="Skip groups with damaged payloads instead of failing."
        ),
    ] = False,
) -> None:
    """Export groups and tokens to Parquet or JSON Lines files. Rerun to resume."""
    from replaydb.exchange import export_groups

    wanted = condition(where)
    with_store(url, lambda store: check_known(store, buffer, tasks=task, runs=run))
    with progress("groups") as bar:
        report = export_groups(
            url,
            destination,
            buffer=buffer,
            tasks=task,
            statuses=status,
            runs=run,
            where=wanted,
            format="jsonl" if jsonl else "parquet",
            damaged="skip" if skip_damaged else "raise",
            progress=bar,
        )
    typer.echo(
        f"{report.num_groups} groups, {report.num_episodes} episodes in {report.num_files} files, "
        f"{human_size(report.num_bytes)}: {printable(report.url)}"
    )
    if report.num_left_out:
        typer.echo(f"not exported: {report.num_left_out} groups without readable tokens")


def import_(
    url: Url,
    source: Annotated[
        str, typer.Argument(help="Folder, file, s3://BUCKET/PREFIX, gs://... or az://...")
    ],
    buffer: Annotated[
        str | None,
        typer.Option(help="Put all groups into this buffer (default: the buffers in the files)."),
    ] = None,
    create: Annotated[bool, typer.Option("--create", help="Create missing buffers.")] = False,
) -> None:
    """Import exported groups into a store. Skips groups whose uids exist. Rerun to resume."""
    from replaydb.exchange import import_groups

    with progress("groups") as bar:
        report = import_groups(url, source, buffer=buffer, create=create, progress=bar)
    typer.echo(
        f"put {report.num_put} of {report.num_groups} groups; read {report.num_episodes} episodes "
        f"in {report.num_files} files"
    )


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
    from replaydb.exchange.formats import lines_of, reading

    with reading(file.name, "a file with lines of JSON"):
        for where, line in lines_of(file, file.name):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise InvalidInputError(where, "JSON", error) from error
            if not isinstance(row, dict):
                raise InvalidInputError(where, "a JSON object", row)
            yield row


def _parquet(file: Path) -> Iterator[Any]:
    from replaydb.exchange.formats import reading
    from replaydb.exchange.parquet import batches_of

    with reading(file.name, "a Parquet file"):
        for batch in batches_of(file, file.name):
            yield from batch.to_pylist()


_READERS = {".jsonl": _lines, ".parquet": _parquet}


def _tokenizer(path: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except Exception as error:  # transformers raises errors of many types
        raise InvalidInputError("tokenizer", "a Hugging Face tokenizer", path) from error
