"""Projection of what a fleet of rollout GPUs needs, from the measured cost of one group.

This is arithmetic, not a measurement. It assumes that costs are proportional to the number of
groups:

    groups per second = GPUs * tokens per second of one GPU / tokens of one group
    cost of a group = its put, lease and ack + (draws - 1) * one more sample
    need = groups per second * cost of a group
    GPUs at which a resource ends = capacity / (cost of a group * groups per second of one GPU)

A put wakes every trainer rank that waits for groups, which reads how many there are. The longer it
has waited, the less often it does so:

    checks per second = min(groups per second, checks per second after a wait of ten seconds)
    cores for waiting ranks = checks per second * ranks * CPU seconds of one wake-up

Puts and draws of one task hold its lock one after another, for some round trips to the server:

    seconds of the lock = round trips * duration of one + CPU seconds of the database
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

#: Amount of each resource that one group or one client uses: CPU seconds, bytes, requests.
Costs = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Assumptions:
    """Properties of a fleet and of its database server that the benchmark does not measure.

    Attributes:
        gpu_tokens: Tokens per second of one rollout GPU: the order of magnitude for a model of 7B
            parameters with continuous batching.
        gpus_per_worker: Rollout GPUs whose groups are put by one process.
        gpus_per_rank: Rollout GPUs for each trainer rank that draws.
        cores: Cores of the server.
        disk_operations: Reads, writes and flushes per second of the server's disk.
        disk_bytes: Bytes per second that the disk writes.
        network_bytes: Bytes per second of the server's network in one direction.
        connections: Connections that the server accepts.
        checks: Maximum number of checks per second of a call that has waited for ten seconds.
    """

    gpu_tokens: int = 2500
    gpus_per_worker: int = 8
    gpus_per_rank: int = 8
    cores: int = 32
    disk_operations: int = 20_000
    disk_bytes: float = 1e9
    network_bytes: float = 3.125e9
    connections: int = 1000
    checks: float = 10.0


def groups_per_second(gpus: float, tokens: int, assumed: Assumptions) -> float:
    """Return how many groups of a number of tokens the GPUs generate per second."""
    return gpus * assumed.gpu_tokens / tokens


def cost(once: Costs, again: Costs, draws: int) -> dict[str, float]:
    """Return the cost of a group that is drawn `draws` times: once leased, then sampled again."""
    return {name: value + (draws - 1) * again.get(name, 0.0) for name, value in once.items()}


def needs(group: Costs, gpus: int, tokens: int, assumed: Assumptions) -> dict[str, float]:
    """Return how much of each resource the fleet uses per second."""
    rate = groups_per_second(gpus, tokens, assumed)
    return {name: rate * value for name, value in group.items()}


def connections(gpus: float, of_worker: float, of_rank: float, assumed: Assumptions) -> float:
    """Return the number of connections of all workers and trainer ranks."""
    return gpus * (of_worker / assumed.gpus_per_worker + of_rank / assumed.gpus_per_rank)


def limits(group: Costs, capacity: Costs, tokens: int, assumed: Assumptions) -> dict[str, float]:
    """Return the number of GPUs at which each resource is used up; without the unused ones."""
    of_gpu = needs(group, 1, tokens, assumed)
    return {name: most / of_gpu[name] for name, most in capacity.items() if of_gpu.get(name)}


def waiting(gpus: float, wake_up: float, tokens: int, assumed: Assumptions) -> float:
    """Return the cores that the database needs while all ranks wait, beside those of the puts."""
    checks = min(groups_per_second(gpus, tokens, assumed), assumed.checks)
    return checks * gpus / assumed.gpus_per_rank * wake_up


def waiting_limit(cores: float, wake_up: float, tokens: int, assumed: Assumptions) -> float:
    """Return the number of GPUs at which waiting ranks use these cores."""
    if not wake_up:
        return math.inf
    ranks = cores / wake_up  # if each checked once per second
    quadratic = math.sqrt(ranks * assumed.gpus_per_rank / groups_per_second(1, tokens, assumed))
    return max(quadratic, ranks * assumed.gpus_per_rank / assumed.checks)


def locked(seconds: Mapping[float, float], round_trip: float, cpu: float) -> float:
    """Return for how many seconds a group locks its task.

    Args:
        seconds: The same, measured with two durations of a round trip, in milliseconds.
        round_trip: Duration of a round trip in milliseconds.
        cpu: CPU seconds of the database for a group.
    """
    (one, first), (other, second) = seconds.items()
    return round_trip * (second - first) / (other - one) + cpu
