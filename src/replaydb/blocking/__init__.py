"""The store for code that does not run in an event loop: same methods, same arguments.

    with replaydb.blocking.Store.open("sqlite:///grpo.db") as store:
        buffer = store.buffer("math")
        batch = buffer.sample(64, timeout=30)

One thread runs the event loop of a store; calls hand their work to it and wait. They may come
from any number of threads. Methods are made from the async ones, so there is nothing here to keep
in step: see `replaydb.Store` and `replaydb.Buffer` for what they do. A lease is taken by the call
(`with` then acks or nacks it), and a loader is a plain iterator.

If a signal handler raises during a call, as on Ctrl-C, the call is cancelled and awaited before the
exception is raised: nothing continues in the background. `docs/training.md` lists the instructions
of the interpreter at which an interrupt can still leave a lease until its ttl.

A store does not outlive a fork: connections cannot be shared. In the child it raises
`NotSupportedError`; open another one there.
"""

from replaydb.blocking.facade import Buffer, Lease, Loader, Store, replace_uninformative
from replaydb.publishing import publish

__all__ = ["Buffer", "Lease", "Loader", "Store", "replace_uninformative"]

publish(__name__, __all__)
del publish
