"""Blocking API: the same stores and methods for code without an event loop.

    with replaydb.blocking.Store.open("sqlite:///grpo.db") as store:
        buffer = store.buffer("math")
        batch = buffer.sample(64, timeout=30)

Each store has one thread with an event loop. Calls submit their work to it and wait; any number of
threads can call. Methods have the arguments and results of the async ones, see `replaydb.Store` and
`replaydb.Buffer`. Two things differ: `lease` and `open_lease` take the lease at once (`with` then
acks or nacks it), and a loader is a plain iterator.

If a signal handler raises during a call, as on Ctrl-C, the call is cancelled and awaited before the
exception is raised: nothing continues in the background. `docs/training.md` lists the instructions
of the interpreter at which an interrupt can still leave a lease until its ttl.

Functions that are passed to a call run in threads of the store. They cannot make blocking calls.

A store cannot be used in a forked process, because connections cannot be shared. There it raises
`NotSupportedError`; open another store in the child.
"""

from replaydb.blocking.facade import Buffer, Claim, Lease, Loader, Store, replace_uninformative
from replaydb.util.publishing import publish

__all__ = ["Buffer", "Claim", "Lease", "Loader", "Store", "replace_uninformative"]

publish(__name__, __all__)
del publish
