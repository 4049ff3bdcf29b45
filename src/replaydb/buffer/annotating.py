"""Call that adds values to stored episodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from replaydb.buffer.putting import Putting
from replaydb.database.repository.late_values import Annotated, annotate
from replaydb.database.repository.late_values import Annotating as Call
from replaydb.database.repository.locked import Scope
from replaydb.database.runtime.session import Session
from replaydb.database.runtime.transactions import BULK_SECONDS, end_in
from replaydb.domain import checks
from replaydb.domain.annotations import Annotation


class Annotating(Putting):
    """Add rewards, advantages and metadata to stored episodes and turns."""

    async def annotate(
        self,
        annotations: Annotation | Iterable[Annotation],
        *,
        author: str | None = None,
        policy_version: int | None = None,
        if_match: Mapping[str, str] | None = None,
    ) -> dict[str, str]:
        """Add values to stored episodes and turns, all of them or none.

        Groups of every status can be annotated, also while they are leased. Draws that are made
        afterwards return the new values. Records of earlier draws keep what was drawn:
        `training_history` and `redraw` show it. The view `annotation_history` has each value with
        the one before, its author and time.

        A group that waited for the last of these values, because the setting `requires` names them,
        is completed in the same transaction.

        The call can be repeated: a value that is there already is not changed, and not recorded.

        Args:
            annotations: The values. If one is given twice, the last one counts.
            author: Who made them, such as the name of a judge.
            policy_version: Policy version of the model that made them.
            if_match: For some groups, by uid, the `etag` that was read with them. If one has
                changed since, nothing is changed.

        Returns:
            The etags of the groups now, by uid.

        Raises:
            ContentChangedError: A group has another etag than in `if_match`.
            UnknownGroupError: A group does not exist.
            UnknownTurnError: An episode has no such turn. Turns of groups that were stored before
                revision 0015 cannot be annotated.
            CorruptPayloadError: Values that are stored cannot be read.
            InvalidInputError: An argument is invalid, there is no episode at a position, or a turn
                gets a reward and its episode has none.
        """
        etags = checks.etags("if_match", if_match)
        return await self._annotate(checked(annotations), etags, author, policy_version, None)

    async def _annotate(
        self,
        annotations: Sequence[Annotation],
        if_match: Mapping[str, str],
        author: str | None,
        policy_version: int | None,
        claim_uid: str | None,
    ) -> dict[str, str]:
        """As `annotate`, perhaps for the holder of a claim."""
        call = Call(
            annotations,
            if_match,
            checks.optional(checks.name, "author", author),
            checks.optional(checks.policy_version, "policy_version", policy_version),
            claim_uid,
        )
        if not call.annotations and not call.if_match:
            return {}

        def work(scope: Scope, session: Session) -> Annotated:
            return annotate(scope, session, call)

        done = await self._write(work, end_in(BULK_SECONDS), records_run=True)
        for uid in done.completed:
            self._joining.join_soon(uid)
        return done.etags


def checked(annotations: Annotation | Iterable[Annotation]) -> Sequence[Annotation]:
    """Return one or several annotations as a sequence."""
    given = [annotations] if isinstance(annotations, Annotation) else annotations
    expected = "an Annotation or a sequence of them"
    return checks.instances("annotations", given, Annotation, expected)
