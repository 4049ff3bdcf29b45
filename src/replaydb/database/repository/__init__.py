"""What a store does, as functions of a connection: each runs statements in the caller's
transaction, none begins or ends one.

Whatever changes groups takes a `LockedBuffer`, got from `locking`; what only reads takes the
connection.
"""  # noqa: D205
