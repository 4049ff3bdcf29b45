"""What a store does, as functions of a connection: each runs statements in the caller's
transaction, none begins or ends one.

Locks are taken in one order everywhere, so nobody deadlocks: the buffer, then its tasks by id,
then groups. A task's lock makes its clocks and counters exact; it is taken after what is large
has been written, and held until the commit.
"""  # noqa: D205
