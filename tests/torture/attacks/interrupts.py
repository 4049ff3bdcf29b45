"""A blocking call that is interrupted has ended before the exception, and leaves nothing behind.

A process makes blocking calls, and another sends it SIGINT at random moments, also twice in a row.
After every signal no lease may be left, and no thread; a put that was not stored when the exception
came must not be stored later.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import Counter

from torture import judge
from torture.arena import Arena

PROMISES = (2, 6)
ENGINES = ("sqlite", "postgresql")

#: Rounds a second: with its checks, a round takes about 15 ms.
ROUNDS_PER_SECOND = 60
#: An interrupt may hit the few instructions at the start of `with`, see docs/training.md.
WINDOW_SHARE = 0.01


async def attack(arena: Arena) -> None:
    """Interrupt every kind of call."""
    rounds = int(ROUNDS_PER_SECOND * arena.seconds)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "support.interrupts"),
        *(arena.url, str(arena.chance.getrandbits(32)), str(rounds)),
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
    arena.figures += figures
    left = sum(count for what, count in figures.items() if what.startswith("leases left"))
    assert left <= WINDOW_SHARE * figures["interrupts"], figures
    assert not figures["puts stored late"], figures
    judge.check(await judge.read(arena.url))
