"""Display of episodes: their turns as text, or as colored tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from replaydb.domain.decoding import LONGEST_CHARACTER, Decode, token_texts
from replaydb.domain.episodes import Episode, Turn
from replaydb.domain.episodes.unrepeated import Unrepeated

By = Literal["logprob", "advantage", "mask", "version"]

#: Tokens per part, for a view of single tokens and for decoded text.
TOKENS, TEXT_TOKENS = 1000, 5000
#: Characters per part of a stored text.
CHARACTERS = 20_000
#: Tokens before a part that are decoded together with it.
BEFORE = 8
#: Tokens, or characters of a text, at the beginning and at the end of an excerpt.
MAX_TOKENS, MAX_CHARACTERS = 200, 700

#: Names of the token extras with advantages. The first one that there is counts.
ADVANTAGES = ("advantages", "advantage")

#: Upper bounds of the logprob of each color.
LOGPROBS = (-0.05, -0.2, -0.5, -1.0, -2.0, -4.0, -6.0, -8.0)
#: Number of colors of policy versions. With more versions, colors repeat.
VERSIONS = 8


@dataclass(frozen=True, slots=True)
class Token:
    """A displayed token.

    Attributes:
        position: Position in the episode.
        id: Token id.
        text: Text that the token adds; its id if there is no tokenizer.
        is_empty: Whether it adds no text: it is not in the vocabulary, or the next token completes
            its character.
        color: CSS class.
        tooltip: The value that the color represents.
        trained: Whether the loss mask includes it.
        logprob: Logprob under the policy that sampled it. None if not recorded or not sampled.
        advantage: Advantage of the token, or of the episode. None if it is not trained on.
        version: Policy version that sampled it. None if unknown.
    """

    position: int
    id: int
    text: str
    is_empty: bool
    color: str
    tooltip: str
    trained: bool
    logprob: float | None
    advantage: float | None
    version: int | None


@dataclass(frozen=True, slots=True)
class Span:
    """A range of tokens of an episode: a prompt or a response.

    Attributes:
        name: Name of the span.
        start: Position of the first token.
        end: Position after the last token.
        sampled: Whether the policy sampled the tokens.
        turn: The turn of the tokens; None if the episode has no turns.
    """

    name: str
    start: int
    end: int
    sampled: bool
    turn: Turn | None = None

    def cut(self, start: int, end: int) -> Span:
        """Return the intersection with a part."""
        first, last = max(self.start, start), min(self.end, end)
        return Span(self.name, first, last, self.sampled, self.turn)


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a long episode, as shown on one page.

    Attributes:
        number: Number of the part, from 0.
        count: Number of parts.
        start: Position where the part begins.
        end: Position after its end.
        total: Length of the whole episode.
        unit: Unit of positions: "tokens" or "characters".
    """

    number: int
    count: int
    start: int
    end: int
    total: int
    unit: str = "tokens"

    @classmethod
    def of(cls, number: int, total: int, size: int, unit: str = "tokens") -> Part:
        """Return the part with a number, or the last one if the number is too large."""
        count = max(1, math.ceil(total / size))
        number = min(number, count - 1)
        return cls(number, count, number * size, min(total, (number + 1) * size), total, unit)

    def has(self, span: Span) -> bool:
        """Whether the part overlaps a span. An empty span is located at its start."""
        if span.start < span.end:
            return span.start < self.end and span.end > self.start
        return self.start <= span.start < self.end or span.start == self.end == self.total


def spans(tokens: Unrepeated) -> list[Span]:
    """Return prompt and response, or context and response of each turn.

    Empty spans are omitted, except for responses of turns.
    """
    turns, offsets = tokens.episode.turns, tokens.offsets
    found: list[Span] = []
    for i, (segment, shared) in enumerate(zip(tokens.segments, tokens.shared, strict=True)):
        turn, before = (turns[i], f"turn {i + 1} of {len(turns)}: ") if turns else (None, "")
        context = "context" if turns else "prompt"
        if shared:
            context += f" after {shared:,} tokens of turn {tokens.parents[i] + 1}"
        middle = offsets[i] + segment.prompt_length - shared
        found += [
            Span(before + context, offsets[i], middle, False, turn),
            Span(f"{before}response", middle, offsets[i + 1], True, turn),
        ]
    return [span for span in found if span.start < span.end or (span.sampled and span.turn)]


def tokens_of(
    tokens: Unrepeated,
    part: Part,
    by: By,
    decode: Decode | None,
    advantage: float | None,
    max_advantage: float,
) -> Iterator[tuple[Span, list[Token]]]:
    """Yield the spans of a part with their tokens.

    Args:
        tokens: The tokens of the episode.
        part: The part.
        by: The value that colors represent.
        decode: Decodes tokens; None without a tokenizer.
        advantage: Advantage of the episode, for episodes without advantages per token.
        max_advantage: The absolute advantage that has the strongest color.
    """
    at = part.start, part.end
    ids = tokens.token_ids(*at).tolist()
    texts = texts_in_range(Ids(tokens), *at, decode)
    mask = tokens.loss_mask(*at).tolist()
    logprobs = _each(tokens.logprobs(*at), part)
    own = own_advantages(tokens, *at)
    advantages = _each(advantage if own is None else own, part)
    versions = _each(tokens.versions(*at), part)
    color = _colors(tokens, by, max_advantage)
    for span in [span.cut(*at) for span in spans(tokens) if part.has(span)]:
        shown = []
        for position in range(span.start, span.end):
            i = position - part.start
            logprob = _known(logprobs[i]) if span.sampled else None
            version = versions[i] if span.sampled else None
            values = (mask[i], logprob, _known(advantages[i]) if mask[i] else None, version)
            name, tooltip = color(*values)
            text = texts[i].replace("\n", "↵\n")
            shown.append(Token(position, ids[i], text, not text, name, tooltip, *values))
        yield span, shown


def _known(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else value


def highest_advantage(tokens: Unrepeated, advantage: float | None) -> float:
    """Return the largest absolute advantage of the tokens, or that of the episode; 0 if none."""
    own = own_advantages(tokens)
    if own is None:
        return 0.0 if advantage is None else abs(advantage)
    mask = tokens.loss_mask()[: len(own)]
    return float(np.abs(own[mask & np.isfinite(own)]).max(initial=0.0))


def own_advantages(tokens: Unrepeated, begin: int = 0, end: int | None = None) -> Any:
    """Return the advantages per token from the token extras; None if there are none."""
    found = tokens.token_extras(begin, end, ADVANTAGES)
    known = [found[name] for name in ADVANTAGES if name in found]
    return next((one for one in known if isinstance(one, np.ndarray) and one.ndim == 1), None)


def legend(tokens: Unrepeated, by: By, max_advantage: float) -> list[tuple[str, str]]:
    """Return the CSS classes with the values that they represent."""
    if by == "mask":
        return [("on", "in the loss"), ("off", "not in the loss")]
    if by == "version":
        found = [(f"v{i % VERSIONS}", f"version {it}") for i, it in enumerate(_versions(tokens))]
        return [*found[:100], ("none", "context, or unknown")]
    if by == "advantage":
        values = [max_advantage * i / 4 for i in range(-4, 5)] if max_advantage > 0 else [0.0]
        return [
            *((_advantage_class(it, max_advantage), f"{it:+.3g}" if it else "0") for it in values),
            ("none", "not in the loss, or no advantage"),
        ]
    return [
        ("s0", f"above {LOGPROBS[0]:g}"),
        *((f"s{i}", f"{bound:g} and below") for i, bound in enumerate(LOGPROBS, start=1)),
        ("none", "context, or not recorded"),
    ]


def _colors(tokens: Unrepeated, by: By, max_advantage: float) -> Callable[..., tuple[str, str]]:
    """Return a function that gives the CSS class and tooltip of a token."""
    versions = _versions(tokens) if by == "version" else []
    colors = {version: i % VERSIONS for i, version in enumerate(versions)}

    def color(
        trained: bool, logprob: float | None, advantage: float | None, version: int | None
    ) -> tuple[str, str]:
        if by == "mask":
            return ("on", "in the loss") if trained else ("off", "not in the loss")
        if by == "version" and version is not None:
            return f"v{colors[version]}", f"version {version}"
        if by == "advantage" and advantage is not None:
            return _advantage_class(advantage, max_advantage), f"advantage {advantage:.4g}"
        if by == "logprob" and logprob is not None:
            return f"s{sum(logprob <= it for it in LOGPROBS)}", f"logprob {logprob:.4g}"
        return "none", f"no {by}"

    return color


def _advantage_class(value: float, max_advantage: float) -> str:
    """Return the CSS class of an advantage: m4 to m1, a0, p1 to p4."""
    share = 0.0 if max_advantage <= 0 else max(-1.0, min(1.0, value / max_advantage))
    step = round(share * 4) or int(math.copysign(1, share)) if share else 0
    return "a0" if step == 0 else f"{'p' if step > 0 else 'm'}{abs(step)}"


def _versions(tokens: Unrepeated) -> list[int]:
    version = tokens.versions()
    if version is None or isinstance(version, int):
        return [] if version is None else [version]
    return list(np.unique(version).tolist())


def _each(values: Any, part: Part) -> list[Any]:
    """Return one value per token of a part, from an array, a single value or None."""
    count = part.end - part.start
    if isinstance(values, np.ndarray):
        return [*values.tolist(), *[None] * (count - len(values))]
    return [values] * count


class Ids:
    """Token ids of an episode as an array whose slices are made when they are asked for."""

    def __init__(self, tokens: Unrepeated, begin: int = 0, end: int | None = None) -> None:
        self._tokens, self._begin = tokens, begin
        self._end = tokens.num_tokens if end is None else end

    def __len__(self) -> int:
        return self._end - self._begin

    def __getitem__(self, at: slice | int) -> Any:
        if isinstance(at, int):
            return self[at : at + 1][0]
        begin, end, _ = at.indices(len(self))
        return self._tokens.token_ids(self._begin + begin, self._begin + max(begin, end))


def texts_in_range(ids: Any, start: int, end: int, decode: Decode | None) -> list[str]:
    """Return the text that each token of a range adds to the tokens before it, "" if none.

    Args:
        ids: All token ids of an episode.
        start: Position of the first token.
        end: Position after the last token.
        decode: Decodes tokens. None: the text of a token is its id.
    """
    if decode is None:
        return [f"{it} " for it in ids[start:end].tolist()]
    before = max(0, start - BEFORE)
    texts = token_texts(ids[before : end + LONGEST_CHARACTER].tolist(), decode)
    return texts[start - before : end - before]


def decoded_text(ids: Any, start: int, end: int, decode: Decode) -> str:
    """Return the text of a range of tokens.

    If a character consists of tokens on both sides of a boundary, it is part of the range before
    the boundary. Tokens that decode to no text, such as ids outside the vocabulary, are shown as
    their ids.

    Args:
        ids: All token ids of an episode or span.
        start: Position of the first token.
        end: Position after the last token.
        decode: Decodes tokens.
    """
    start, end = (_character_boundary(ids, at, decode) for at in (start, end))
    texts = []
    for empty in _empty_tokens(ids, start, end, decode):
        texts += [_added_text(ids, start, empty, decode), f"⟨{ids[empty]}⟩"]
        start = empty + 1
    return "".join([*texts, _added_text(ids, start, end, decode)])


def _added_text(ids: Any, start: int, end: int, decode: Decode) -> str:
    """Return the text that a range of tokens adds to the tokens before it."""
    before = max(0, start - BEFORE)
    known = len(decode(ids[before:start].tolist()))
    return decode(ids[before:end].tolist())[known:]


def _empty_tokens(ids: Any, start: int, end: int, decode: Decode) -> list[int]:
    """Return the positions of tokens that add no text.

    Some tokens, such as blanks, decode to nothing alone but add text after other tokens.
    """
    alone = [it for it in np.unique(ids[start:end]).tolist() if not decode([it])]
    positions = start + np.flatnonzero(np.isin(ids[start:end], alone))
    return [it for it in positions.tolist() if not _added_text(ids, it, it + 1, decode)]


def _character_boundary(ids: Any, at: int, decode: Decode) -> int:
    """Return the first position from `at` on that does not split a character."""
    for cut in range(at, min(at + LONGEST_CHARACTER, len(ids))):
        if not decode(ids[max(0, cut - BEFORE) : cut].tolist()).endswith("\ufffd"):
            return cut
    return at if at + LONGEST_CHARACTER < len(ids) else len(ids)


def texts_of(
    one: Episode | None, text: str | None, number: int, decode: Decode | None
) -> tuple[Part, list[tuple[str, Turn | None, str]]]:
    """Return a part of an episode as text.

    Without tokens or a tokenizer the text is the stored text of the episode, if any.

    Args:
        one: The episode; None if its tokens cannot be read.
        text: Its stored text; None if there is none.
        number: Number of the part, from 0.
        decode: Decodes tokens; None without a tokenizer.

    Returns:
        The part, and for each of its spans the name, the turn if the span is the response of one,
        and the text.
    """
    if one is None or decode is None:
        text = text or ""
        part = Part.of(number, len(text), CHARACTERS, "characters")
        return part, [("text", None, text[part.start : part.end])] if text else []
    tokens = Unrepeated(one)
    part = Part.of(number, tokens.num_tokens, TEXT_TOKENS)
    texts = _span_texts(tokens, part, decode)
    return part, [(span.name, span.turn if span.sampled else None, text) for span, text in texts]


def _span_texts(tokens: Unrepeated, part: Part, decode: Decode) -> Iterator[tuple[Span, str]]:
    """Yield the spans that a part overlaps, with their text inside the part."""
    for span in spans(tokens):
        if part.has(span):
            cut, ids = span.cut(part.start, part.end), Ids(tokens, span.start, span.end)
            yield span, decoded_text(ids, cut.start - span.start, cut.end - span.start, decode)


@dataclass(frozen=True, slots=True)
class Excerpt:
    """The beginning and the end of the text of an episode, or all of it.

    Attributes:
        ends: Beginning and end, or the whole text. Each is a list of names and texts of spans; the
            name is "" if the episode has no turns.
        left_out: Number of omitted tokens or characters between the two.
        unit: "tokens" or "characters".
    """

    ends: Sequence[Sequence[tuple[str, str]]]
    left_out: int
    unit: str


def excerpt(one: Episode | None, text: str | None, decode: Decode | None) -> Excerpt | None:
    """Return an excerpt of the response, or None without a text. Arguments as of `texts_of`."""
    if one is not None and decode is not None:
        tokens = Unrepeated(one)
        start, end = one.prompt_length, tokens.num_tokens
        left_out = max(0, end - start - 2 * MAX_TOKENS)
        ends = [(start, start + MAX_TOKENS), (end - MAX_TOKENS, end)]
        parts = [Part(0, 1, *at, end) for at in (ends if left_out else [(start, end)])]
        shown = [
            [
                (span.name if span.turn else "", span_text)
                for span, span_text in _span_texts(tokens, part, decode)
            ]
            for part in parts
        ]
        return Excerpt(shown, left_out, "tokens")
    if text is None:
        return None
    left_out = max(0, len(text) - 2 * MAX_CHARACTERS)
    texts = [text[:MAX_CHARACTERS], text[-MAX_CHARACTERS:]] if left_out else [text]
    return Excerpt([[("", it)] for it in texts], left_out, "characters")
