"""`torchtitan.experiments.rl` on a machine without a GPU: import this before any of it.

What the package imports first, vLLM, is for CUDA only. Its work buffer, rollouts, metrics, sample
builder and batcher do not need that: they are imported from a package whose own module was made but
not run.
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
