"""The guarantees of the fuzz targets, for the corpus (with all that once failed) and mutants."""

from __future__ import annotations

from itertools import islice

import pytest

from fuzz import __main__, targets
from fuzz.mutations import MUTATIONS, mutants
from fuzz.targets import CORPUS, TARGETS, varied_groups
from replaydb import Store
from replaydb.database.filters.parsing import parsed
from replaydb.errors import InvalidInputError
from support.examples import examples

INPUTS = {name: sorted((CORPUS / name).iterdir()) for name in TARGETS}


@pytest.mark.parametrize("name", TARGETS)
def test_the_corpus(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "STORE_EVERY", 1)
    assert len(INPUTS[name]) > 5
    with TARGETS[name]() as check:
        for path in INPUTS[name]:
            check(path.read_bytes())


def test_the_corpus_is_small() -> None:
    assert sum(path.stat().st_size for paths in INPUTS.values() for path in paths) < 300_000


@pytest.mark.parametrize("name", TARGETS)
def test_mutants(name: str) -> None:
    assert MUTATIONS.keys() == TARGETS.keys()
    with TARGETS[name]() as check:
        for data in islice(mutants(name, seed=0), examples(60)):
            check(data)


async def test_filters_find_the_same_on_both_engines(sqlite_url: str, postgresql_url: str) -> None:
    async with Store.open(sqlite_url) as store, Store.open(postgresql_url) as other:
        buffers = await store.buffer("math"), await other.buffer("math", indexed_tags=["level"])
        for buffer in buffers:
            await buffer.put(varied_groups())
            await buffer.advance_policy(7)
        several = [path.read_text("utf8", "surrogateescape") for path in INPUTS["filter"]]
        wheres = [parsed(text).where for text in several if is_valid(text)]
        assert len(wheres) > 15
        for where in wheres:
            first, second = [await buffer.find(where=where) for buffer in buffers]
            assert [one.group_uid for one in first] == [one.group_uid for one in second]


def is_valid(text: str) -> bool:
    try:
        return bool(parsed(text))
    except InvalidInputError:
        return False


@pytest.mark.nightly
@pytest.mark.parametrize("name", TARGETS)
def test_many_mutants(name: str) -> None:
    assert __main__.passes(name, seed=1, seconds=60)
