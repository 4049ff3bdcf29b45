"""`skyrl.train` on a machine without a GPU: import this before any of it.

Its packages import inference engines, and pydantic refuses types of `skyrl.tinker` on Python 3.11.
Generator outputs and the trainer's loops need neither. They are imported from packages whose own
modules were created but not executed.
"""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

import skyrl

for _name in (
    "skyrl.backends",
    "skyrl.backends.skyrl_train",
    "skyrl.backends.skyrl_train.inference_servers",
    "skyrl.train",
    "skyrl.train.generators",
):
    if _name not in sys.modules:
        _parent, _, _last = _name.rpartition(".")
        _spec = PathFinder.find_spec(_name, sys.modules[_parent].__path__)
        assert _spec is not None
        sys.modules[_name] = module_from_spec(_spec)
        setattr(sys.modules[_parent], _last, sys.modules[_name])

assert skyrl.train is sys.modules["skyrl.train"]
