"""Tables of the benchmark `fleet`: measured costs of a group, and projections to larger fleets."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping

from benchmarks.report.findings import Findings
from benchmarks.report.markdown import markdown
from benchmarks.results import Result, number
from benchmarks.scaling import projection
from benchmarks.scaling.fleet import (
    AGAIN,
    BUCKET,
    CONNECTIONS,
    CORES,
    FAR,
    FOR_RANKS,
    LEASES,
    MOST,
    NEAR,
    ONCE,
    PUTS,
    RANKS,
    RATE,
    SIDES,
    SLOW,
    WAIT,
    WORKERS,
)
from benchmarks.scaling.fleet_client import BATCH

#: Numbers of rollout GPUs, and of draws of each group.
FLEETS, DRAWS = (64, 512, 4096), (1, 4)
ASSUMED = projection.Assumptions()
LOADS = {
    (ONCE, FAR): f"{ONCE}, round trips of {FAR:g} ms:",
    (ONCE, NEAR): f"{ONCE}, no delay:",
    (AGAIN, FAR): f"one more sample, round trips of {FAR:g} ms:",
    (WAIT, FAR): f"put while {RANKS} ranks wait for more groups, round trips of {FAR:g} ms:",
}
NETWORK = f"{8 * ASSUMED.network_bytes / 1e9:g} Gbit/s of network"
#: Capacities of one server with their labels, by the measured amounts that use them.
CAPACITIES: Mapping[str, tuple[str, float]] = {
    "database: CPU": (f"{ASSUMED.cores} cores", ASSUMED.cores),
    "database: disk operations": (
        f"{ASSUMED.disk_operations:,} disk operations/s",
        ASSUMED.disk_operations,
    ),
    "database: disk writes": (
        f"{ASSUMED.disk_bytes / 1e9:g} GB/s of disk writes",
        ASSUMED.disk_bytes,
    ),
    "database: network in": (f"{NETWORK}, in", ASSUMED.network_bytes),
    "database: network out": (f"{NETWORK}, out", ASSUMED.network_bytes),
}

_Cases = dict[str, list[Result]]


def costs(findings: Findings) -> list[str]:
    """Return the measured tables: costs of a group for each load, and the highest throughput."""
    lines = []
    for (load, delay), title in LOADS.items():
        found = _by_case(findings.of("fleet", load=load, delay=delay))
        rows = [
            [_label(side), *(_cell(results, side, delay) for results in found.values())]
            for side in SIDES
            if any(_values(results).get(side) is not None for results in found.values())
        ]
        table = markdown(["one group", *found], rows, left=1)
        lines += ["", f"{title[0].upper()}{title[1:]}", "", *table] if table else []
    rows = [
        [
            load,
            f"{delay:g} ms",
            case,
            *(_cell(results, side, delay) for side in (RATE, "database: CPU", CORES)),
        ]
        for load, delay in [(MOST, FAR), *((load, at) for load in (PUTS, LEASES) for at in SLOW)]
        for case, results in _by_case(findings.of("fleet", load=load, delay=delay)).items()
    ]
    headings = ["calls", "round trip", "", "groups", "database: CPU for a group", CORES]
    many = f"{WORKERS} workers and {RANKS} ranks on one task, without pauses:"
    lines += ["", many, "", *markdown(headings, rows, left=3)] if rows else []
    return lines[1:]


def needs(findings: Findings) -> list[str]:
    """Return what fleets need, computed from the measured costs."""
    rows = []
    clients = _by_case(findings.of("fleet", load=CONNECTIONS))
    wake_up = _wake_up(findings)
    for case, (once, again, tokens) in _measured(findings).items():
        of_clients = _values(clients[case])
        for gpus in FLEETS:
            several = [
                projection.needs(projection.cost(once, again, draws), gpus, tokens, ASSUMED)
                for draws in DRAWS
            ]
            cells: list[Callable[[Mapping[str, float]], float | None]] = [
                lambda need: need["database: disk operations"],
                lambda need: need["database: disk writes"] / 1e6,
                lambda need: (need["database: network in"] + need["database: network out"]) / 1e6,
                lambda need: _sum(need, "bucket: PUT", "bucket: GET", "bucket: LIST"),
                lambda need: _sum(need, "bucket: network in", "bucket: network out", by=1e6),
            ]
            connected = projection.connections(
                gpus, of_clients["workers"], of_clients["ranks"], ASSUMED
            )
            rows.append(
                [
                    case, f"{gpus:,}",
                    _digits(projection.groups_per_second(gpus, tokens, ASSUMED)),
                    _pair([need["database: CPU"] for need in several]),
                    _digits(projection.waiting(gpus, wake_up, tokens, ASSUMED)),
                    *(_pair([cell(need) for need in several]) for cell in cells),
                    f"{connected:,.0f}",
                ]
            )  # fmt: skip
    headings = [
        "groups", "GPUs", "groups/s", "database cores", "cores for waiting ranks",
        "disk operations/s", "disk MB/s", "database network, MB/s", "bucket requests/s",
        "bucket MB/s", "connections",
    ]  # fmt: skip
    return markdown(headings, rows, left=1)


def limits(findings: Findings) -> list[str]:
    """Return the numbers of GPUs at which the resources of one server end, the first in bold."""
    columns: dict[str, dict[str, float]] = {}
    capacities = {side: most for side, (_, most) in CAPACITIES.items()}
    tasks = {load: _by_case(findings.of("fleet", load=load, side=RATE)) for load in (PUTS, LEASES)}
    clients = _by_case(findings.of("fleet", load=CONNECTIONS))
    wake_up = _wake_up(findings)
    lock, wakes = "the lock of one task", f"{ASSUMED.cores} cores for waiting ranks"
    connected = f"{ASSUMED.connections:,} connections"
    for case, (once, _, tokens) in _measured(findings).items():
        found = projection.limits(once, capacities, tokens, ASSUMED)
        column = columns[case] = {CAPACITIES[side][0]: gpus for side, gpus in found.items()}
        of_gpu = _values(clients[case])
        of_one = projection.connections(1, of_gpu["workers"], of_gpu["ranks"], ASSUMED)
        column[connected] = ASSUMED.connections / of_one
        column[wakes] = projection.waiting_limit(ASSUMED.cores, wake_up, tokens, ASSUMED)
        if case in tasks[PUTS]:
            pairs = zip(tasks[PUTS][case], tasks[LEASES][case], strict=True)
            seconds = {put.facts["delay"]: 1 / put.value + 1 / lease.value for put, lease in pairs}
            group = {"lock": projection.locked(seconds, FAR, once["database: CPU"])}
            column[lock] = projection.limits(group, {"lock": 1}, tokens, ASSUMED)["lock"]
    labels = (lock, *(label for label, _ in CAPACITIES.values()), wakes, connected)
    rows = [[label, *(_limit(one, label) for one in columns.values())] for label in labels]
    return markdown(["one database has", *columns], rows if columns else [], left=1)


def _wake_up(findings: Findings) -> float:
    """Return the CPU seconds of the database for each put and waiting rank."""
    used = [one.value for one in findings.of("fleet", load=WAIT, side=FOR_RANKS)] or [0.0]
    return statistics.median(used) / RANKS / SIDES[FOR_RANKS][1]


def _measured(findings: Findings) -> dict[str, tuple[dict[str, float], dict[str, float], int]]:
    """Return the costs of a group, in seconds and bytes, by case: once, and for another draw."""
    again = _by_case(findings.of("fleet", load=AGAIN, delay=FAR))
    return {
        case: (_costs(results), _costs(again[case]), results[0].facts["tokens"])
        for case, results in _by_case(findings.of("fleet", load=ONCE, delay=FAR)).items()
    }


def _costs(results: list[Result]) -> dict[str, float]:
    return {
        side: value / SIDES[side][1] for side, value in _values(results).items() if side in SIDES
    }


def _by_case(results: list[Result]) -> _Cases:
    found: _Cases = {}
    for one in results:
        extras = "" if one.facts["extras"] == "none" else f", {one.facts['extras']}"
        where = "in the database" if one.facts["payloads"] != BUCKET else "in a bucket"
        found.setdefault(f"{one.facts['shape']}{extras}, {where}", []).append(one)
    return found


def _values(results: list[Result]) -> dict[str, float]:
    return {one.facts["side"]: one.value for one in results}


def _cell(results: list[Result], side: str, delay: float) -> str:
    for one in results:
        if (one.facts["side"], one.facts["delay"]) == (side, delay):
            return number(one.value, one.unit).rstrip()
    return ""


def _label(side: str) -> str:
    return f"{side}, draws of {BATCH}" if side == "ranks: CPU" else side


def _sum(need: Mapping[str, float], *sides: str, by: float = 1.0) -> float | None:
    return sum(need[side] for side in sides) / by if sides[0] in need else None


def _pair(values: list[float | None]) -> str:
    texts = ["" if value is None else _digits(value) for value in values]
    return " / ".join(dict.fromkeys(texts))


def _digits(value: float) -> str:
    """Format a number with two significant digits."""
    rounded = float(f"{value:.2g}")
    return f"{rounded:,.0f}" if rounded >= 10 else f"{rounded:g}"


def _limit(column: Mapping[str, float], label: str) -> str:
    if label not in column:
        return ""
    text = _digits(column[label])
    return f"**{text}**" if column[label] == min(column.values()) else text
