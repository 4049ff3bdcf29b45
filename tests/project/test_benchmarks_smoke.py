"""Every benchmark runs, with tiny sizes."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import Counter
from pathlib import Path

import pytest

import replaydb as rdb
from replaydb.operations import verify
from support.engines import postgresql_nightly
from support.invariants import check_invariants

CHECKOUT = Path(__file__).resolve().parents[2]
#: Benchmarks that take several seconds even with tiny sizes.
LONG = "fleet growth loader loop memory neighbors open packs shards shared step trainers viewers"
TINY = r"""
import asyncio, json, sys
from math import isfinite
from pathlib import Path
import torch
from benchmarks.__main__ import measure
from benchmarks.groups import Shape
from benchmarks.options import Options
from benchmarks.registry import BENCHMARKS, ONLY_GPU, ONLY_POSTGRESQL
from benchmarks.report.__main__ import draw, filled
from benchmarks.report.findings import Findings
from benchmarks.results import from_json, to_json, to_table

options = Options(
    rows=(200, 400), shapes=(Shape(2, 16),), megabytes=0, file_rows=50, trainers=(1, 2),
    sharers=(1, 2), tasks=(2, 4), seconds=0.2, rounds=1, long_rounds=1,
)
engine, folder, rooms, left_out = sys.argv[1:]
names = [
    name for name, run in BENCHMARKS.items()
    if run.__module__.split(".")[1] in rooms.split() and name not in left_out.split()
    and (engine == "postgresql" or name not in ONLY_POSTGRESQL)
    and (torch.cuda.is_available() or name not in ONLY_GPU)
]
results, facts = [], {}
asyncio.run(measure(names, [engine], options, results, facts))
assert {one.benchmark for one in results} == set(names)
assert all(isfinite(one.value) for one in results)
assert [one.value for one in results if one.target == 0] == [0] * names.count("open")
assert to_table(results, facts).row_count == len(results)
content = json.loads(json.dumps(to_json(results, facts)))
assert from_json(content) == results

findings = Findings()
findings.add(content)
places = [f"<!-- results: {name} -->\n<!-- /results -->\n" for name in [*names, "targets"]]
page = filled("".join(places), findings)
assert page.count("| --- |") >= len(places), page
assert all(path.stat().st_size > 0 for path in draw(Path(folder), findings))
"""
FILL = """
import asyncio, sys
from benchmarks.filling import fill

asyncio.run(fill(sys.argv[1], 100))
"""
MULTIPLY = """
import asyncio, sys
from benchmarks.multiplying import multiply

asyncio.run(multiply(sys.argv[1], 1000))
"""
WALK = """
import asyncio, json, sys
from benchmarks.call_paths import CALLS, PAGE, RECORD, counted, filled

record = json.loads(RECORD.read_text(encoding="utf8"))
page = PAGE.read_text(encoding="utf8")
stale = []
if filled(page, record) != page:
    stale.append(PAGE.name)
(engine,) = sys.argv[1:]
now = asyncio.run(counted([engine]))[engine]
for call in CALLS:
    for name, found in now[call].items():
        noted = record["now"][engine][call][name]
        if isinstance(found, int):
            if abs(found - noted) > max(5, 0.1 * noted):
                stale.append(f"{call}: {name}: {found}, noted is {noted}")
        elif name == "statements":  # those of two connections have no fixed order
            if sorted(found) != sorted(noted):
                stale.append(f"{call}: {name}: {found}, noted is {noted}")
        elif list(found) != noted:
            stale.append(f"{call}: {name}: {found}, noted is {noted}")
assert not stale, "\\n".join([*stale, "up to date by: python -m benchmarks.call_paths --write"])
"""


@pytest.fixture
def environment(engine_name: str, request: pytest.FixtureRequest) -> dict[str, str]:
    """Environment variables of a process in the checkout, with the running PostgreSQL."""
    own = {"PYTHONPATH": os.pathsep.join([str(CHECKOUT), *sys.path])}
    if engine_name == "postgresql":
        own["REPLAYDB_URL"] = request.getfixturevalue("postgresql_url")
    return os.environ | own


@pytest.mark.parametrize(
    ("engine_name", "rooms", "left_out"),
    [
        ("sqlite", "engines scaling process training", LONG),
        pytest.param("sqlite", "engines scaling process training", "", marks=pytest.mark.nightly),
        # Other packages do not depend on the engine.
        pytest.param("postgresql", "engines scaling", "", marks=pytest.mark.nightly),
    ],
)
async def test_benchmarks_run(
    engine_name: str, rooms: str, left_out: str, environment: dict[str, str], tmp_path: Path
) -> None:
    await run(TINY, engine_name, str(tmp_path), rooms, left_out, environment=environment)


@postgresql_nightly
async def test_filled_buffers_are_consistent(url: str, environment: dict[str, str]) -> None:
    await run(FILL, url, environment=environment)
    assert len(await check_invariants(url)) == 100


@pytest.mark.parametrize("engine_name", ["postgresql"])
async def test_multiplied_buffers_are_sound(url: str, environment: dict[str, str]) -> None:
    await run(MULTIPLY, url, environment=environment)
    rows = await check_invariants(url)
    assert Counter(row["group_status"] for row in rows) == {"archived": 500, "completed": 500}
    async with rdb.Store.open(url) as store:
        report = await verify(store)
        assert report.is_sound, report.problems
        assert report.num_payloads == 1000
        buffer = await store.buffer("bench", create=False)
        *_, drawn, _ = await buffer.draws()
        assert len(drawn.group_ids) == 32
        assert set(drawn.outcomes) == {"acked"}
        await buffer.put(rdb.EpisodeGroup("bench", [rdb.Episode(prompt_ids=[1], response_ids=[2])]))
        assert len(await buffer.sample(40)) == 40
        assert len(await buffer.find(where=rdb.col.tags["level"] == "hard", limit=9)) == 9


@postgresql_nightly
async def test_recorded_call_paths_are_up_to_date(
    engine_name: str, environment: dict[str, str]
) -> None:
    await run(WALK, engine_name, environment=environment)


async def run(code: str, *arguments: str, environment: dict[str, str]) -> None:
    """Run code in a process, as tests cannot import `benchmarks`."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", code, *arguments),
        cwd=CHECKOUT,
        env=environment,
    )
    assert await process.wait() == 0
