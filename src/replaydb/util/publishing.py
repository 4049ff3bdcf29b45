"""Set the public module of exported names."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import fields, is_dataclass
from inspect import isclass, isfunction
from typing import get_type_hints


def publish(module: str, names: Iterable[str], of: str | None = None) -> None:
    """Set `__module__` of the classes and functions of a public module to its name.

    Annotations of a class are resolved first. As text they would be evaluated in the module named
    by `__module__`, where their names are unknown. As a side effect `inspect.getsource` fails for a
    class, because it searches that module; for methods it works.

    Args:
        module: The public module.
        names: Names of the public module.
        of: The module that has the names, if the public module does not have them yet.
    """
    namespace = vars(sys.modules[of or module])
    for thing in map(namespace.__getitem__, names):
        if isclass(thing):
            with suppress(NameError):  # of names imported for type checkers only
                _resolve_annotations(thing)
        if isclass(thing) or isfunction(thing):
            thing.__module__ = module


def _resolve_annotations(cls: type) -> None:
    hints = get_type_hints(cls, include_extras=True)
    own = vars(cls).get("__annotations__", {})
    own.update((name, hints[name]) for name in own)
    if is_dataclass(cls):
        for field in fields(cls):
            field.type = hints[field.name]
