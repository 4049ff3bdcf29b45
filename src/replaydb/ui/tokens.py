"""An episode as it can be read: its turns as text, or as tokens with what is known of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from replaydb.decoding import Decode, pieces
from replaydb.episodes import Episode, Turn

By = Literal["logprob", "advantage", "mask", "version"]

#: Tokens of a part, where each is shown; and where they are only decoded.
TOKENS, TEXT_TOKENS = 1000, 5000
#: Signs of a part of a text.
SIGNS = 20_000
#: Tokens before a part that its first one is decoded after.
BEFORE = 8

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
    """

    number: int
    count: int
    start: int
    end: int
    total: int

    @classmethod
    def of(cls, number: int, total: int, size: int) -> Part:
        """The part of a number, or the last one there is."""
        count = max(1, math.ceil(total / size))
        here = min(number, count - 1)
        return cls(here, count, here * size, min(total, (here + 1) * size), total)


def spans(one: Episode) -> list[Span]:
    """Prompt and response, of each turn if there are turns; empty ones are left out."""
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
    return [span for span in found if span.start < span.end]


def within(one: Episode, part: Part) -> list[Span]:
    """The spans of a part."""
    cut = (span.cut(part.start, part.end) for span in spans(one))
    return [span for span in cut if span.start < span.end]


def tokens_of(
    one: Episode, part: Part, by: By, decode: Decode | None, most: float
) -> Iterator[tuple[Span, list[Token]]]:
    """The tokens of a part, by the spans they belong to.

    Args:
        one: The episode.
        part: Which tokens.
        by: What their colour stands for.
        decode: What decodes them, if there is a tokenizer.
        most: The advantage that has the strongest colour.
    """
    texts = _texts(one, part, decode)
    mask = one.loss_mask[part.start : part.end].tolist()
    logprobs = _each(one.logprobs, part)
    own = _own_advantages(one)
    advantages = _each(one.advantage if own is None else own, part)
    versions = _each(one.policy_version, part)
    colour = _colours(one, by, most)
    for span in within(one, part):
        shown = []
        for position in range(span.start, span.end):
            i = position - part.start
            logprob = logprobs[i] if span.sampled else None
            known = None if logprob is None or math.isnan(logprob) else logprob
            version = versions[i] if span.sampled else None
            facts = (mask[i], known, advantages[i] if mask[i] else None, version)
            name, says = colour(*facts)
            id_ = int(one.token_ids[position])
            shown.append(Token(position, id_, texts[i], name, says, *facts))
        yield span, shown


def highest_advantage(one: Episode) -> float:
    """How far from 0 an advantage of a token is, or that of the episode; 0 where there is none."""
    own = _own_advantages(one)
    if own is None:
        return 0.0 if one.advantage is None else abs(one.advantage)
    return float(np.abs(own[one.loss_mask]).max(initial=0.0))


def _own_advantages(one: Episode) -> Any:
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
        steps = [_advantage(most * i / 4, most) for i in range(-4, 5)]
        return [
            *((name, f"{most * i / 4:+.3g}") for i, name in zip(range(-4, 5), steps, strict=True)),
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


def _texts(one: Episode, part: Part, decode: Decode | None) -> Sequence[str]:
    if decode is None:
        return [f"{it} " for it in one.token_ids[part.start : part.end].tolist()]
    start = max(0, part.start - BEFORE)
    said = pieces(one.token_ids[start : part.end].tolist(), decode)
    return [text.replace("\n", "↵\n") for text in said[part.start - start :]]


def texts_of(
    one: Episode, number: int, decode: Decode | None
) -> tuple[Part, list[tuple[str, str]]]:
    """A part of an episode as text: what each stretch is, and what it says.

    Without a tokenizer it is the text that the episode was put with, if there was one.
    """
    if decode is not None:
        part = Part.of(number, one.num_tokens, TEXT_TOKENS)
        return part, [
            (span.name, decode(one.token_ids[span.start : span.end].tolist()))
            for span in within(one, part)
        ]
    text = one.text or ""
    part = Part.of(number, len(text), SIGNS)
    return part, [("text", text[part.start : part.end])] if text else []


def excerpt(one: Episode, decode: Decode | None, most: int = 1400) -> tuple[str | None, int]:
    """The beginning and the end of what an episode says, and how many signs are left out."""
    if one.text is None and decode is None:
        return None, 0
    if decode is not None:
        ids = one.response_ids
        if len(ids) <= most:
            text = decode(ids.tolist())
        else:
            half = most // 2
            text = f"{decode(ids[:half].tolist())}\n…\n{decode(ids[-half:].tolist())}"
    else:
        text = one.text or ""
    if len(text) <= most:
        return text, 0
    half = most // 2
    return f"{text[:half]}\n…\n{text[-half:]}", len(text) - most
