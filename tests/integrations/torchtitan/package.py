"""`torchtitan.experiments.rl` on a machine without a GPU: import this before any of it.

The package imports vLLM, which needs CUDA. Its work buffer, rollouts, metrics, sample builder and
batcher do not need it: they are imported from a package whose own module was created but not
executed.
"""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

import torchtitan.experiments

_NAME = "torchtitan.experiments.rl"

if _NAME not in sys.modules:
    _spec = PathFinder.find_spec(_NAME, torchtitan.experiments.__path__)
    assert _spec is not None
    sys.modules[_NAME] = module_from_spec(_spec)
