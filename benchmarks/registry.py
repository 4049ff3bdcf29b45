"""Registry of all benchmarks by name."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.bench import Benchmark
from benchmarks.engines import claim, files, packs, put, sample
from benchmarks.process import blocking, delivery, loop, opening
from benchmarks.scaling import (
    advance,
    fleet,
    growth,
    neighbors,
    network,
    scale,
    shared,
    tasks,
    viewers,
)
from benchmarks.training import (
    branches,
    gpu,
    loader,
    memory,
    shards,
    sizes,
    step,
    tensors,
    trainers,
)

BENCHMARKS: Mapping[str, Benchmark] = {
    "put": put.run,
    "sample": sample.run,
    "claim": claim.run,
    "packs": packs.run,
    "files": files.run,
    "scale": scale.run,
    "advance": advance.run,
    "viewers": viewers.run,
    "growth": growth.run,
    "neighbors": neighbors.run,
    "network": network.run,
    "shared": shared.run,
    "tasks": tasks.run,
    "fleet": fleet.run,
    "delivery": delivery.run,
    "trainers": trainers.run,
    "shards": shards.run,
    "step": step.run,
    "loader": loader.run,
    "memory": memory.run,
    "gpu": gpu.run,
    "tensors": tensors.run,
    "branches": branches.run,
    "sizes": sizes.run,
    "loop": loop.run,
    "blocking": blocking.run,
    "open": opening.run,
}
#: Benchmarks without a database, which run once.
WITHOUT_ENGINE = frozenset({"branches", "sizes", "tensors"})
#: Benchmarks of a database on another machine, or of what only PostgreSQL has.
ONLY_POSTGRESQL = frozenset({"fleet", "growth", "network", "shared"})
#: Benchmarks that need a CUDA device.
ONLY_GPU = frozenset({"gpu"})
