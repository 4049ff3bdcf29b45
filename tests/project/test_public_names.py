"""Public names: `__all__`, docstrings, modules and pickling."""

from __future__ import annotations

import inspect
import pickle  # used by process pools
import pkgutil
from dataclasses import fields, is_dataclass
from importlib import import_module
from types import ModuleType
from typing import TypeVar, get_type_hints

import pytest

import replaydb
from replaydb import BufferSettings, Capacity, analysis, blocking, errors, exchange, training

T = TypeVar("T")

MODULES = [
    module.name
    for module in pkgutil.walk_packages(replaydb.__path__, "replaydb.")
    # Integrations need their trainers, and `__main__` runs a program.
    if not module.name.startswith(("replaydb.integrations.", "replaydb.migrations"))
    and not module.name.endswith("__main__")
]


def _own_names(module: ModuleType) -> set[str]:
    return {
        name
        for name in dir(module)
        if not name.startswith("_") and not inspect.ismodule(getattr(module, name))
    }


def test_all_contains_all_public_names() -> None:
    assert set(replaydb.__all__) == _own_names(replaydb)
    with pytest.raises(
        AttributeError, match="module 'replaydb' has no attribute 'Bufer'"
    ) as caught:
        replaydb.Bufer  # type: ignore[attr-defined]  # noqa: B018
    assert caught.value.name == "Bufer"  # with which Python suggests Buffer


@pytest.mark.parametrize("name", ["replaydb", *MODULES])
def test_all_is_sorted_and_its_names_exist(name: str) -> None:
    module = import_module(name)
    listed = getattr(module, "__all__", [])
    assert list(listed) == sorted(set(listed), key=lambda one: (not one.isupper(), one))
    assert [public for public in listed if not hasattr(module, public)] == []


def test_every_public_thing_has_a_docstring() -> None:
    things = {name: getattr(replaydb, name) for name in replaydb.__all__}
    assert [
        name
        for name, thing in things.items()
        if (inspect.isclass(thing) or inspect.isfunction(thing)) and not thing.__doc__
    ] == []


def test_every_error_is_public_and_in_the_hierarchy() -> None:
    classes = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, errors.ReplayDBError)
    }
    assert classes <= set(replaydb.__all__)
    listed = {line.strip("│├└─ ").split(" ")[0] for line in (errors.__doc__ or "").splitlines()}
    assert classes <= listed


def sent(thing: T) -> T:
    """Return the object as another process receives it."""
    received: T = pickle.loads(pickle.dumps(thing))  # noqa: S301 - our own bytes
    return received


PUBLIC = [
    (module, name)
    for module in (replaydb, training, blocking, analysis, exchange)
    for name in module.__all__
    if inspect.isclass(thing := getattr(module, name)) or inspect.isfunction(thing)
]


@pytest.mark.parametrize(
    ("module", "name"), PUBLIC, ids=lambda value: getattr(value, "__name__", value)
)
def test_public_names_have_a_public_module(module: ModuleType, name: str) -> None:
    thing = getattr(module, name)
    assert (thing.__module__, thing.__qualname__) == (module.__name__, name)
    assert sent(thing) is thing
    assert inspect.getmodule(thing) is module


def test_annotations_of_dataclasses_can_be_resolved() -> None:
    """Libraries that load configurations into dataclasses need this."""
    needs_torch = {
        "Episode",
        "PackedBatch",
        "PaddedBatch",
        "Ragged",
        "SplitBatch",
        "TreeBatch",
        "Turn",
    }
    things = {name: getattr(module, name) for module, name in PUBLIC if name not in needs_torch}
    found = {name: thing for name, thing in things.items() if is_dataclass(thing)}
    assert "BufferSettings" in found
    for thing in found.values():
        hints = get_type_hints(thing)
        assert all(field.type == hints[field.name] for field in fields(thing))


@pytest.mark.parametrize(
    "error",
    [
        errors.InvalidInputError("n", "a number", "text"),
        errors.NotEnoughGroupsError(3, 1, "gsm8k", quota=object()),
        errors.CorruptPayloadError("truncated", [3, 4]),
        errors.StoreClosedError(),
        errors.SchemaOutOfDateError("upgrade", None, "0003"),
        errors.DatabaseError("no"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_can_be_pickled(error: errors.ReplayDBError) -> None:
    received = sent(error)
    assert type(received) is type(error)
    assert str(received) == str(error)
    shown = {name: value for name, value in vars(error).items() if not name.startswith("_")}
    assert vars(received) == shown


def test_settings_can_be_pickled() -> None:
    settings = BufferSettings(capacity=Capacity(groups=3))
    assert sent(settings) == settings
    assert repr(settings).startswith("BufferSettings(")
