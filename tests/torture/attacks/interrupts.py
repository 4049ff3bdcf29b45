"""An interrupted blocking call has ended before the exception is raised, and leaves nothing behind.

A process makes blocking calls, and another one sends it SIGINT at random times, sometimes twice.
After every signal no lease and no thread may be left. A put that was not stored when the exception
was raised must not be stored later.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import Counter

from torture import checker
from torture.context import AttackContext

PROMISES = (2, 6)
ENGINES = ("sqlite", "postgresql")

#: A round takes about 15 ms with its checks.
ROUNDS_PER_SECOND = 60
#: Allowed share of leaked leases: an interrupt can hit the few instructions at the start of `with`,
#: see docs/training.md.
WINDOW_SHARE = 0.01


async def attack(context: AttackContext) -> None:
    """Interrupt all kinds of calls."""
    rounds = int(ROUNDS_PER_SECOND * context.seconds)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "support.interrupts"),
        *(context.url, str(context.chance.getrandbits(32)), str(rounds)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        out, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, errors.decode()
    figures = Counter(json.loads(out))
    context.figures += figures
    left = sum(count for what, count in figures.items() if what.startswith("leases left"))
    assert left <= WINDOW_SHARE * figures["interrupts"], figures
    assert not figures["puts stored late"], figures
    checker.check_tables(await checker.read_tables(context.url))
