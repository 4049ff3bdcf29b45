"""Exponential variates for the sampling keys of `docs/sampling.md`."""

from __future__ import annotations

import hashlib
import os

import numpy as np
from numpy.typing import NDArray

#: Philox generates four 64-bit words from one value of its counter.
WORDS_PER_COUNT = 4


def exponentials(
    seed: int | None, stream: str, counter: int, count: int
) -> tuple[NDArray[np.float64], int]:
    """Generate `count` variates of Exp(1).

    Philox4x64-10 (Salmon et al., 2011) is counter-based: `seed`, `stream` and `counter` alone
    determine the variates, on every machine and either engine. Without a seed its key is entropy
    from the operating system, so forked processes generate different variates. The raw words are
    used, since only these are the same in every version of numpy.

    Returns:
        The variates, float64 [count], and the counter of the next ones.
    """
    if seed is None:
        key = np.frombuffer(os.urandom(16), np.uint64)
    else:
        digest = hashlib.blake2b(stream.encode(), digest_size=8).digest()
        key = np.array([seed, int.from_bytes(digest, "little")], np.uint64)
    words = np.random.Philox(counter=counter, key=key).random_raw(count)
    uniform = ((words >> np.uint64(11)).astype(np.float64) + 1.0) * 2.0**-53  # in (0, 1]
    return -np.log(uniform), counter + -(-count // WORDS_PER_COUNT)
