"""Operations on a store, as functions of a connection.

Each runs statements in the caller's transaction; none begins or ends one. Functions that change
groups take a `LockedBuffer` from `locking`; functions that only read take the connection.
"""
