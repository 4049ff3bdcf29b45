"""An episode as it can be read: its turns as text, or as tokens with what is known of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from replaydb.decoding import LONGEST_SIGN, Decode, pieces
from replaydb.episodes import Episode, Turn

By = Literal["logprob", "advantage", "mask", "version"]

#: Tokens of a part, where each is shown; and where they are only decoded.
TOKENS, TEXT_TOKENS = 1000, 5000
#: Signs of a part of a text.
SIGNS = 20_000
#: Tokens before a part that its first one is decoded after.
BEFORE = 8
#: Tokens, or signs of a text, on either side of what an excerpt leaves out.
MOST_TOKENS, MOST_SIGNS = 200, 700

#: From a token of this logprob on downwards the next colour is taken.
LOGPROBS = (-0.05, -0.2, -0.5, -1.0, -2.0, -4.0, -6.0, -8.0)
#: Colours of versions; those of more versions come again.
VERSIONS = 8


@dataclass(frozen=True, slots=True)
class Token:
    """A token as it is shown.

    Attributes:
        position: Its place in the episode.
        id: What the model knows it as.
        text: What it adds to the text; its id where there is no tokenizer.
        is_silent: Whether that is nothing: it is not of the vocabulary, or the next one ends a sign
            that it begins.
        colour: Class of the style sheet.
        says: The value that the colour stands for, in words.
        trained: Whether the loss mask lets it through.
        logprob: That of the policy that made it; None where not recorded, or not sampled.
        advantage: Its own, or that of the episode; None where it is not trained on.
        version: Policy version that made it; None where unknown.
    """

    position: int
    id: int
    text: str
    is_silent: bool
    colour: str
    says: str
    trained: bool
    logprob: float | None
    advantage: float | None
    version: int | None


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens of an episode that belong together.

    Attributes:
        name: What they are.
        start: The first of them.
        end: The one after the last.
        sampled: Whether the policy made them.
        turn: The turn that they are of; None where there are no turns.
    """

    name: str
    start: int
    end: int
    sampled: bool
    turn: Turn | None = None

    def cut(self, start: int, end: int) -> Span:
        """What of it is within a part."""
        first, last = max(self.start, start), min(self.end, end)
        return Span(self.name, first, last, self.sampled, self.turn)


@dataclass(frozen=True, slots=True)
class Part:
    """A part of something long.

    Attributes:
        number: Its place, from 0.
        count: Parts there are.
        start: Where it begins.
        end: Where it ends.
        total: How long all of it is.
        unit: In what: "tokens" or "signs".
    """

    number: int
    count: int
    start: int
    end: int
    total: int
    unit: str = "tokens"

    @classmethod
    def of(cls, number: int, total: int, size: int, unit: str = "tokens") -> Part:
        """The part of a number, or the last one there is."""
        count = max(1, math.ceil(total / size))
        here = min(number, count - 1)
        return cls(here, count, here * size, min(total, (here + 1) * size), total, unit)

    def has(self, span: Span) -> bool:
        """Whether some of it is in this part; an empty one is where its tokens would begin."""
        if span.start < span.end:
            return span.start < self.end and span.end > self.start
        return self.start <= span.start < self.end or span.start == self.end == self.total


def spans(one: Episode) -> list[Span]:
    """Prompt and response, or of each turn its context and answer; of empty ones only answers."""
    found: list[Span] = []
    if not one.turns:
        found = [
            Span("prompt", 0, one.prompt_length, False),
            Span("response", one.prompt_length, one.num_tokens, True),
        ]
    at = 0
    for i, turn in enumerate(one.turns):
        middle = at + len(turn.prompt_ids)
        end = middle + len(turn.response_ids)
        name = f"turn {i + 1} of {len(one.turns)}"
        found += [
            Span(f"{name}: context", at, middle, False, turn),
            Span(f"{name}: answer", middle, end, True, turn),
        ]
        at = end
    return [span for span in found if span.start < span.end or (span.sampled and span.turn)]


def within(one: Episode, part: Part) -> list[Span]:
    """The spans of a part, as far as they are in it."""
    return [span.cut(part.start, part.end) for span in spans(one) if part.has(span)]


def tokens_of(
    one: Episode,
    part: Part,
    by: By,
    decode: Decode | None,
    advantage: float | None,
    most: float,
) -> Iterator[tuple[Span, list[Token]]]:
    """The tokens of a part, by the spans they belong to.

    Args:
        one: The episode.
        part: Which tokens.
        by: What their colour stands for.
        decode: What decodes them, if there is a tokenizer.
        advantage: That of the episode, for tokens that have none of their own.
        most: The advantage that has the strongest colour.
    """
    texts = pieces_of(one.token_ids, part.start, part.end, decode)
    mask = one.loss_mask[part.start : part.end].tolist()
    logprobs = _each(one.logprobs, part)
    own = own_advantages(one)
    advantages = _each(advantage if own is None else own, part)
    versions = _each(one.policy_version, part)
    colour = _colours(one, by, most)
    for span in within(one, part):
        shown = []
        for position in range(span.start, span.end):
            i = position - part.start
            logprob = _known(logprobs[i]) if span.sampled else None
            version = versions[i] if span.sampled else None
            facts = (mask[i], logprob, _known(advantages[i]) if mask[i] else None, version)
            name, says = colour(*facts)
            id_, text = int(one.token_ids[position]), texts[i].replace("\n", "↵\n")
            shown.append(Token(position, id_, text, not text, name, says, *facts))
        yield span, shown


def _known(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else value


def highest_advantage(one: Episode, advantage: float | None) -> float:
    """How far from 0 an advantage of a token is, or that of the episode; 0 where there is none."""
    own = own_advantages(one)
    if own is None:
        return 0.0 if advantage is None else abs(advantage)
    return float(np.abs(own[one.loss_mask & np.isfinite(own)]).max(initial=0.0))


def own_advantages(one: Episode) -> Any:
    """Those of each token, where they are among the extras."""
    for name in ("advantages", "advantage"):
        own = one.token_extras.get(name)
        if isinstance(own, np.ndarray) and own.ndim == 1:
            return own
    return None


def legend(one: Episode, by: By, most: float) -> list[tuple[str, str]]:
    """Classes of the style sheet, and what they stand for."""
    if by == "mask":
        return [("on", "trained on"), ("off", "not trained on")]
    if by == "version":
        found = [(f"v{i % VERSIONS}", f"version {it}") for i, it in enumerate(_versions(one))]
        return [*found[:100], ("none", "context, or unknown")]
    if by == "advantage":
        values = [most * i / 4 for i in range(-4, 5)] if most > 0 else [0.0]
        return [
            *((_advantage(it, most), f"{it:+.3g}" if it else "0") for it in values),
            ("none", "not trained on, or none"),
        ]
    return [
        ("s0", f"above {LOGPROBS[0]:g}"),
        *((f"s{i}", f"{bound:g} and below") for i, bound in enumerate(LOGPROBS, start=1)),
        ("none", "context, or not recorded"),
    ]


def _colours(one: Episode, by: By, most: float) -> Callable[..., tuple[str, str]]:
    """What gives the class of a token, and says the value that it stands for."""
    places = {version: i % VERSIONS for i, version in enumerate(_versions(one))}

    def colour(
        trained: bool, logprob: float | None, advantage: float | None, version: int | None
    ) -> tuple[str, str]:
        if by == "mask":
            return ("on", "trained on") if trained else ("off", "not trained on")
        if by == "version" and version is not None:
            return f"v{places[version]}", f"version {version}"
        if by == "advantage" and advantage is not None:
            return _advantage(advantage, most), f"advantage {advantage:.4g}"
        if by == "logprob" and logprob is not None:
            return f"s{sum(logprob <= it for it in LOGPROBS)}", f"logprob {logprob:.4g}"
        return "none", f"no {by}"

    return colour


def _advantage(value: float, most: float) -> str:
    """m4 to m1, a0, p1 to p4."""
    share = 0.0 if most <= 0 else max(-1.0, min(1.0, value / most))
    step = round(share * 4) or int(math.copysign(1, share)) if share else 0
    return "a0" if step == 0 else f"{'p' if step > 0 else 'm'}{abs(step)}"


def _versions(one: Episode) -> list[int]:
    version = one.policy_version
    if version is None or isinstance(version, int):
        return [] if version is None else [version]
    return list(np.unique(version).tolist())


def _each(values: Any, part: Part) -> list[Any]:
    """Of each token of a part, where there is one for each, or one for all, or none."""
    if isinstance(values, np.ndarray):
        return list(values[part.start : part.end].tolist())
    return [values] * (part.end - part.start)


def pieces_of(ids: Any, start: int, end: int, decode: Decode | None) -> list[str]:
    """What each of some tokens adds to the text of those before; nothing, if it has none.

    Args:
        ids: The tokens of an episode.
        start: The first of those.
        end: The one after the last.
        decode: What decodes them; None: their ids are the text.
    """
    if decode is None:
        return [f"{it} " for it in ids[start:end].tolist()]
    before = max(0, start - BEFORE)
    said = pieces(ids[before : end + LONGEST_SIGN].tolist(), decode)
    return said[start - before : end - before]


def said_by(ids: Any, start: int, end: int, decode: Decode) -> str:
    """The text of some tokens; of a sign that is made of several, the one after has all of it.

    Tokens that decode to nothing, as a vocabulary has them not, are there as their ids.

    Args:
        ids: The tokens of an episode, or of a part of it.
        start: The first of those.
        end: The one after the last.
        decode: What decodes them.
    """
    start, end = (_between_signs(ids, at, decode) for at in (start, end))
    said = []
    for silent in _silent(ids, start, end, decode):
        said += [_added(ids, start, silent, decode), f"⟨{ids[silent]}⟩"]
        start = silent + 1
    return "".join([*said, _added(ids, start, end, decode)])


def _added(ids: Any, start: int, end: int, decode: Decode) -> str:
    """What some tokens add to the text of those before."""
    before = max(0, start - BEFORE)
    known = len(decode(ids[before:start].tolist()))
    return decode(ids[before:end].tolist())[known:]


def _silent(ids: Any, start: int, end: int, decode: Decode) -> list[int]:
    """Which tokens add nothing; alone some do not either that do after others, such as a blank."""
    alone = [it for it in np.unique(ids[start:end]).tolist() if not decode([it])]
    places = start + np.flatnonzero(np.isin(ids[start:end], alone))
    return [it for it in places.tolist() if not _added(ids, it, it + 1, decode)]


def _between_signs(ids: Any, at: int, decode: Decode) -> int:
    """Where tokens can be cut, so that no sign is cut: there, or soon after."""
    for cut in range(at, min(at + LONGEST_SIGN, len(ids))):
        if not decode(ids[max(0, cut - BEFORE) : cut].tolist()).endswith("\ufffd"):
            return cut
    return at if at + LONGEST_SIGN < len(ids) else len(ids)


def texts_of(
    one: Episode | None, text: str | None, number: int, decode: Decode | None
) -> tuple[Part, list[tuple[str, Turn | None, str]]]:
    """A part of an episode as text: what a stretch is, whose answer it is, and what it says.

    Without its tokens, or a tokenizer, it is the text that the episode was put with, if any.
    """
    if one is None or decode is None:
        text = text or ""
        part = Part.of(number, len(text), SIGNS, "signs")
        return part, [("text", None, text[part.start : part.end])] if text else []
    part = Part.of(number, one.num_tokens, TEXT_TOKENS)
    said = _said_in(one, part, decode)
    return part, [(span.name, span.turn if span.sampled else None, text) for span, text in said]


def _said_in(one: Episode, part: Part, decode: Decode) -> Iterator[tuple[Span, str]]:
    """What each span of a part says, as far as it is in it."""
    for span in spans(one):
        if part.has(span):
            cut, ids = span.cut(part.start, part.end), one.token_ids[span.start : span.end]
            yield span, said_by(ids, cut.start - span.start, cut.end - span.start, decode)


@dataclass(frozen=True, slots=True)
class Excerpt:
    """The beginning and the end of what an episode says, or all of it.

    Attributes:
        ends: What is shown, as stretches: what each is, "" where there are no turns, and its text.
        left_out: How much is between the two that is not shown.
        unit: Of what: "tokens" or "signs".
    """

    ends: Sequence[Sequence[tuple[str, str]]]
    left_out: int
    unit: str


def excerpt(one: Episode | None, text: str | None, decode: Decode | None) -> Excerpt | None:
    """Of what an episode says; None where that is not known. Arguments as of `texts_of`."""
    if one is not None and decode is not None:
        start, end = one.prompt_length, one.num_tokens
        left_out = max(0, end - start - 2 * MOST_TOKENS)
        ends = [(start, start + MOST_TOKENS), (end - MOST_TOKENS, end)]
        parts = [Part(0, 1, *at, end) for at in (ends if left_out else [(start, end)])]
        said = [
            [(span.name if span.turn else "", text) for span, text in _said_in(one, part, decode)]
            for part in parts
        ]
        return Excerpt(said, left_out, "tokens")
    if text is None:
        return None
    left_out = max(0, len(text) - 2 * MOST_SIGNS)
    texts = [text[:MOST_SIGNS], text[-MOST_SIGNS:]] if left_out else [text]
    return Excerpt([[("", it)] for it in texts], left_out, "signs")
