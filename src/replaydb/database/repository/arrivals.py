"""Exponential variates for the arrival clocks of `docs/sampling.md`."""

from __future__ import annotations

import hashlib
import os

import numpy as np
from numpy.typing import NDArray

#: Philox makes four 64-bit words from one value of its counter.
WORDS_PER_COUNT = 4


def exponentials(
    seed: int | None, stream: str, counter: int, count: int
) -> tuple[NDArray[np.float64], int]:
    """Draw `count` variates of Exp(1), as float64 [count], and say where the stream goes on.

    Philox4x64-10 (Salmon et al., 2011) is counter-based: `seed`, `stream` and `counter` alone
    decide what comes, on every machine and either engine. Without a seed it is keyed by the
    operating system, which also keeps forked processes apart. Its raw words are used, since only
    they are the same in every version of numpy.
    """
    if seed is None:
        key = np.frombuffer(os.urandom(16), np.uint64)
    else:
        digest = hashlib.blake2b(stream.encode(), digest_size=8).digest()
        key = np.array([seed, int.from_bytes(digest, "little")], np.uint64)
    words = np.random.Philox(counter=counter, key=key).random_raw(count)
    uniform = ((words >> np.uint64(11)).astype(np.float64) + 1.0) * 2.0**-53  # in (0, 1]
    return -np.log(uniform), counter + -(-count // WORDS_PER_COUNT)
