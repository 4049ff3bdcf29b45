"""What `replaydb` offers is listed, sorted, once."""

from __future__ import annotations

import inspect
import pkgutil
from importlib import import_module
from types import ModuleType

import pytest

import replaydb
from replaydb import errors

MODULES = [
    module.name
    for module in pkgutil.walk_packages(replaydb.__path__, "replaydb.")
    # Integrations need the trainers they are for, and `__main__` runs.
    if not module.name.startswith(("replaydb.integrations.", "replaydb.migrations"))
    and not module.name.endswith("__main__")
]


def _own_names(module: ModuleType) -> set[str]:
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }


def test_all_is_everything_public() -> None:
    assert set(replaydb.__all__) == _own_names(replaydb) - {"annotations"}


@pytest.mark.parametrize("name", ["replaydb", *MODULES])
def test_all_is_sorted_and_there(name: str) -> None:
    module = import_module(name)
    listed = getattr(module, "__all__", [])
    assert list(listed) == sorted(set(listed))
    assert [public for public in listed if not hasattr(module, public)] == []


def test_every_public_thing_has_a_docstring() -> None:
    things = {name: getattr(replaydb, name) for name in replaydb.__all__}
    assert [
        name
        for name, thing in things.items()
        if (inspect.isclass(thing) or inspect.isfunction(thing)) and not thing.__doc__
    ] == []


def test_every_error_is_public_and_drawn() -> None:
    classes = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, errors.ReplayDBError)
    }
    assert classes <= set(replaydb.__all__)
    drawn = {line.strip("│├└─ ").split(" ")[0] for line in (errors.__doc__ or "").splitlines()}
    assert classes <= drawn
