"""Claim: trajectories that one process continues."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Self

from replaydb.batch.stored import StoredGroup
from replaydb.buffer.annotating import checked
from replaydb.buffer.heartbeat import Heartbeat
from replaydb.buffer.lease import storable
from replaydb.buffer.tracing import traced
from replaydb.domain import checks
from replaydb.domain.annotations import Annotation, has_value
from replaydb.domain.episodes import Episode, GroupStatus, Turn
from replaydb.domain.episodes.arrays import ArrayLike
from replaydb.errors import (
    ClaimExpiredError,
    DatabaseError,
    InvalidInputError,
    StoreClosedError,
)
from replaydb.util.cancellation import run_to_completion

if TYPE_CHECKING:
    from replaydb.buffer.claiming import Claiming


@traced
class Claim:
    """One trajectory of an incremental group, or all open ones, claimed by this process.

    Get it from `Buffer.claim`. Only its holder can add to these trajectories, until each of them is
    finished or unusable, the claim is released, or it expires. Inside `async with`, a heartbeat
    extends the claim while the event loop runs. At the end of the block, trajectories that are
    still open are released, and if the block raised, this counts as an attempt.

    A claim of episodes that lack a value (`missing`) is the same. It ends when they have the value.

    A claim is not a draw: it is in no history of draws and in no rate limit.

    Attributes:
        uid: Uid of the claim.
        group: The group: task, uid, prompt, extras and tags. Without its episodes, unless
            `missing` was given.
        turns: The turns that were appended to each trajectory before it was claimed, by position.
        missing: Name of the value that the claimed episodes lack; None: trajectories are claimed.
    """

    def __init__(
        self,
        buffer: Claiming,
        uid: str,
        ttl: float,
        group: StoredGroup,
        turns: Mapping[int, tuple[Turn, ...]],
        missing: str | None = None,
    ) -> None:
        self._buffer = buffer
        self._heartbeat = Heartbeat(ttl, lambda seconds: buffer._extend_claim(uid, seconds))
        self._open = set(turns)
        self.uid = uid
        self.group = group
        self.turns = dict(turns)
        self.missing = missing

    def __repr__(self) -> str:
        return f"Claim({self.group.group_uid!r}, positions {[*self.turns]})"

    @property
    def ttl(self) -> float:
        """Duration in seconds from the last extension."""
        return self._heartbeat.ttl

    @property
    def positions(self) -> tuple[int, ...]:
        """Positions of its trajectories, or episodes, in the group."""
        return tuple(self.turns)

    @property
    def episodes(self) -> dict[int, Episode]:
        """The episodes that lack the value, by position; none of a claim of trajectories."""
        stored = zip(self.group.positions, self.group.episodes, strict=True)
        return {position: one for position, one in stored if position in self.turns}

    async def append_turn(
        self, turn: Turn, *, position: int | None = None, parent_uid: str | None = None
    ) -> None:
        """Append a turn to a trajectory. It is durable when the call returns.

        The call can be repeated: a turn that is there already, by its `uid`, is not appended again.

        Args:
            turn: The turn. It needs a `uid`. Its `parent`, if it has one, was appended before.
            position: Position of the trajectory. Only for a claim of several.
            parent_uid: See `Buffer.append_turn`.

        Raises:
            ClaimExpiredError: The claim has ended. Nothing was stored.
            DuplicateTurnError: The group has another turn with this uid.
            UnknownTurnError: The parent is not a turn of this trajectory.
            DuplicateEpisodeError: The claim has ended, and the position has an episode.
            GroupClosedError: The group accepts no more turns.
            InvalidInputError: An argument is invalid.
        """
        at = self._position(position)
        await self._buffer._append(self.group.group_uid, at, turn, parent_uid, self.uid)

    async def finish_episode(
        self,
        *,
        position: int | None = None,
        reward: float | None = None,
        advantage: float | None = None,
        finish_reason: str | None = None,
        extras: Mapping[str, ArrayLike] | None = None,
        metadata: Mapping[str, Any] | None = None,
        text: str | None = None,
        discarded: Iterable[str] = (),
        tags: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> GroupStatus:
        """Finish a trajectory: its turns become an episode of the group.

        See `Buffer.finish_episode`, which does the same without a claim.

        Raises:
            ClaimExpiredError: The claim has ended. Nothing was stored.
        """
        at = self._position(position)
        status = await self._buffer._finish(
            self.group.group_uid,
            at,
            discarded,
            tags,
            timeout,
            self.uid,
            reward=reward,
            advantage=advantage,
            finish_reason=finish_reason,
            extras=extras,
            metadata=metadata,
            text=text,
        )
        self._open.discard(at)
        return status

    async def add_episode(
        self,
        episode: Episode,
        *,
        position: int | None = None,
        tags: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> GroupStatus:
        """Add an episode to the group, in place of a trajectory without appended turns.

        See `Buffer.add_episode`.

        Raises:
            ClaimExpiredError: The claim has ended. Nothing was stored.
        """
        at = self._position(position)
        status = await self._buffer._add(
            self.group.group_uid, episode, at, timeout, tags=tags, claim_uid=self.uid
        )
        self._open.discard(at)
        return status

    async def fail_episode(
        self, reason: str, *, position: int | None = None, timeout: float | None = None
    ) -> GroupStatus:
        """Mark a trajectory as unusable. See `Buffer.fail_episode`.

        Raises:
            ClaimExpiredError: The claim has ended. Nothing was changed.
        """
        at = self._position(position)
        status = await self._buffer._fail(
            self.group.group_uid, at, reason, timeout, claim_uid=self.uid
        )
        self._open.discard(at)
        return status

    async def annotate(
        self,
        annotations: Annotation | Iterable[Annotation],
        *,
        author: str | None = None,
        policy_version: int | None = None,
    ) -> None:
        """Add values to the claimed episodes and their turns, all of them or none.

        See `Buffer.annotate`, which does the same without a claim. An episode is not claimed any
        more when it has the value that it lacked.

        Raises:
            ClaimExpiredError: The claim has ended. Nothing was stored.
            InvalidInputError: An argument is invalid, or an annotation is not of an episode of this
                claim.
        """
        given = checked(annotations)
        for i, one in enumerate(given):
            if one.group_uid != self.group.group_uid or one.position not in self.turns:
                expected = f"one of an episode of {self!r}"
                actual = f"one of position {one.position} of group {one.group_uid!r}"
                raise InvalidInputError(f"annotations[{i}]", expected, actual)
        await self._buffer._annotate(given, {}, author, policy_version, self.uid)
        for one in given:
            if self.missing is not None and one.turn is None and has_value(self.missing, vars(one)):
                self._open.discard(one.position)

    async def extend(self, ttl: float | None = None) -> None:
        """Extend the claim to `ttl` seconds from now.

        Args:
            ttl: Seconds, also for later extensions. Default: the current `ttl` of the claim.

        Raises:
            ClaimExpiredError: The claim has ended.
            InvalidInputError: `ttl` is not a positive number.
        """
        await self._heartbeat.extend(ttl)

    async def release(self, *, reason: str | None = None) -> None:
        """End the claim. Its open trajectories keep their turns, and can be claimed again.

        Args:
            reason: Why they could not be finished. The call then counts as an attempt: at
                `max_attempts` of the buffer's settings a trajectory becomes unusable, or a value is
                not waited for any more. Default: they can be continued, and no attempt is counted.

        Raises:
            ClaimExpiredError: The claim has ended.
            InvalidInputError: `reason` is invalid.
        """
        why = checks.optional(checks.string, "reason", reason)
        await self._buffer._release_claim(self.uid, why, attempts=int(why is not None))
        self._open.clear()

    def _position(self, position: int | None) -> int:
        """Return the position of a trajectory of the claim.

        Raises:
            InvalidInputError: It has none at this position, or several and none was given.
        """
        if position is None and len(self.turns) == 1:
            return self.positions[0]
        if position is None or position not in self.turns:
            expected = f"one of {list(self.positions)}, the positions of this claim"
            raise InvalidInputError("position", expected, position)
        return position

    async def __aenter__(self) -> Self:
        if self._heartbeat.is_started:
            raise InvalidInputError("claim", "one whose block was not entered before", self)
        self._heartbeat.start()
        return self

    async def __aexit__(self, _: object, error: BaseException | None, __: object) -> None:
        await run_to_completion(self._close(error))

    async def _close(self, error: BaseException | None) -> None:
        """Stop the heartbeat, and release what is still open."""
        await self._heartbeat.stop()
        if not self._open:
            return
        why = None if error is None else storable(f"{type(error).__name__}: {error}")
        # An error of the block is the one to raise. Without one, an ended claim needs no release.
        with contextlib.suppress(ClaimExpiredError, DatabaseError, StoreClosedError):
            await self.release(reason=why)
