"""Parsing of filters in the syntax of Python expressions."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import given, settings
from hypothesis import strategies as st

from replaydb import Buffer, EpisodeGroup, InvalidInputError, col
from replaydb.database.filters import compiling
from replaydb.database.filters.group_columns import COLUMNS
from replaydb.database.filters.parsing import MAX_CHARACTERS, parsed
from support.engines import both_engines
from support.groups import episode

tags: Any = col.tags
LATER = datetime(2999, 1, 1, tzinfo=UTC)

#: Filters as text, each with the equivalent Python expression.
SAME: dict[str, Any] = {
    "reward_mean > 0.5": col.reward_mean > 0.5,
    "0.25 < reward_mean <= 0.75": (col.reward_mean > 0.25) & (col.reward_mean <= 0.75),
    "0.5 <= reward_mean": col.reward_mean >= 0.5,
    "reward_mean * 2 - reward_std > 1": col.reward_mean * 2 - col.reward_std > 1,
    "id % 2 == 1": col.id % 2 == 1,
    "id < 3": col.id < 3,
    "2 > id": col.id < 2,
    "id <= 3 or id >= 11": (col.id <= 3) | (col.id >= 11),
    "3 != id": col.id != 3,
    "not reward_mean > 0.5": ~(col.reward_mean > 0.5),
    "reward_mean > 0.5 and prompt_uid == 'p1' or id == 1": sa.or_(
        (col.reward_mean > 0.5) & (col.prompt_uid == "p1"), col.id == 1
    ),
    "(rdb.col.reward_mean > 0.5) & ~(col.prompt_uid == 'p1')": (col.reward_mean > 0.5)
    & ~(col.prompt_uid == "p1"),
    "prompt_uid is None": col.prompt_uid.is_(None),
    "prompt_uid == None": col.prompt_uid.is_(None),
    "prompt_uid is not None": col.prompt_uid.is_not(None),
    "prompt_uid != 'p1'": col.prompt_uid != "p1",
    'prompt_uid in ["p1", "p2"]': col.prompt_uid.in_(["p1", "p2"]),
    'prompt_uid not in ("p1",)': col.prompt_uid.not_in(["p1"]),
    "has_transcript": col.has_transcript.is_(True),
    "not has_transcript": col.has_transcript.is_(False),
    'tags["level"] == 3': tags["level"] == 3,
    'tags["level"] == "hard"': tags["level"] == "hard",
    'tags["level"] in [3, "hard"]': tags["level"].in_([3, "hard"]),
    'tags["spec"]["langs"][0] == "py"': tags["spec"]["langs"][0] == "py",
    'tags["spec", "langs", 0] == "py"': tags["spec", "langs", 0] == "py",
    'tags["level"].as_float() > reward_mean': tags["level"].as_float() > col.reward_mean,
    'tags["level"] is None': tags["level"].is_(None),
    'coalesce(tags["level"], "") != "hard"': sa.func.coalesce(tags["level"], "") != "hard",
    'prompt_uid.startswith("p")': col.prompt_uid.startswith("p"),
    'prompt_uid.endswith("1")': col.prompt_uid.endswith("1"),
    'prompt_uid.icontains("P2")': col.prompt_uid.icontains("P2"),
    'upper(prompt_uid).like("P_")': sa.func.upper(col.prompt_uid).like("P_"),
    "reward_mean.between(0.25, 0.5)": col.reward_mean.between(0.25, 0.5),
    # Conditions as operands.
    "(id in [1, 2]) == has_transcript": (col.id == 2)
    | (col.id > 2) & col.has_transcript.is_(False),
    "has_transcript == (id not in [1, 2])": (col.id == 1)
    | (col.id > 2) & col.has_transcript.is_(True),
    "(not id in [1, 2]).is_not(None) and id < 3": col.id < 3,
    "prompt_uid.not_in(['p1']).is_(None)": col.prompt_uid.is_(None),
    "(not prompt_uid.like('p_')) is None": col.prompt_uid.is_(None),
    "(id > 4).in_([True, True])": col.id > 4,
    'created_at < "2999-01-01"': col.created_at < LATER,
    'created_at >= "2998-12-31T23:00-01:00"': col.created_at >= LATER,
}


@both_engines
async def test_a_parsed_filter_finds_the_same_groups(buffer: Buffer) -> None:
    levels: list[Any] = [3, "hard", 0.25, None]
    for i in range(12):
        group_tags = {"level": levels[i % 4], "spec": {"langs": ["py" if i % 3 else "c"]}}
        rewards = [i / 8, i / 16]
        await buffer.put(
            EpisodeGroup(
                "gsm8k",
                [episode(reward, text="said" if i % 2 else None) for reward in rewards],
                prompt_uid=f"p{i % 4}" if i % 4 else None,
                tags=group_tags,
            )
        )
    for text, where in SAME.items():
        found = [info.id for info in await buffer.find(where=parsed(text).where)]
        assert found == [info.id for info in await buffer.find(where=where)], text
        assert len(found) < 12 or "2999" in text, text
    sizes = {text: await buffer.count(where=where) for text, where in SAME.items()}
    assert [text for text, size in sizes.items() if not size] == [
        'created_at >= "2998-12-31T23:00-01:00"'
    ]


@both_engines
async def test_staleness_is_compared_with_columns(buffer: Buffer) -> None:
    """Also if another group has another value in them."""
    for version in range(4):
        await buffer.put(EpisodeGroup("gsm8k", [episode(version=version)] * (4 - version)))
    await buffer.advance_policy(4)
    stale = parsed("staleness >= num_episodes and num_episodes >= staleness").where
    assert [one.num_episodes for one in await buffer.find(where=stale)] == [4, 3, 2, 1]
    more = [one.num_episodes for one in await buffer.find(where=parsed("staleness > id + 1").where)]
    assert more == [4]


def test_nested_lists_do_not_grow_exponentially() -> None:
    text = "has_transcript"
    for _ in range(6):
        text = f"({text}).in_([{', '.join(['True'] * 9)}])"
    assert len(str(compiling.checked(parsed(text).where))) < 2 * len(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("reward_meen > 1", "did you mean reward_mean?, got 'reward_meen' at character 1"),
        ("reward_mean > 0.5 and nothing", "got 'nothing' at character 23"),
        ("task_name == 'ß' and x", "got 'x' at character 22"),
        ("reward_mean >", "invalid syntax"),
        ("1 > 2", "a column or a tag on one side, got '1 > 2' at character 1"),
        ("reward_mean > 1 and reward_std > 'a'", "at character 21"),
        ("uniform_key > 1", "got 'uniform_key' at character 1"),
        ("(lambda: 1)()", "got '(lambda: 1)()' at character 1"),
        ("__import__('os').system('id')", "at character 1"),
        ("reward_mean.__class__", "at character 1"),
        ("reward_mean.label('x')", "at character 1"),
        ("reward_mean.op('+')(1) > 2", "at character 1"),
        ("[x for x in (1,)]", "at character 1"),
        ("f'{reward_mean}' == ''", "at character 1"),
        ("2 ** 64 < id", "+, -, *, / or %"),
        ("created_at > 'yesterday'", 'a time such as "2026-11-22 18:30", got'),
        ("reward_mean", "expected a boolean, got a number"),
        ("", "invalid syntax"),
        ("not " * 100 + "has_transcript", "at most 16 nested levels"),
        ("(" * 300 + "1" + ")" * 300, "too many nested parentheses"),
        ("x" * (MAX_CHARACTERS + 1), f"at most {MAX_CHARACTERS} characters"),
    ],
)
def test_an_invalid_filter_is_refused_with_its_position(text: str, message: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        parsed(text)
    assert message in str(refused.value)


_OPERATORS = [
    *("and", "or", "not", "in", "is", "if", "else", "for", "lambda", ":=", "==", "!=", "**"),
    *"<+-*/%&|~,()[]{}:.#",
]
_WORDS = st.sampled_from([
    *sorted(COLUMNS), *_OPERATORS, "tags['a']", "None", "True", "'2026-01-01'", "1", "-0.5",
    "1e999", "1j", "lower(", "coalesce(", ".like(", ".as_float()", "b''", "f''", "...", "'", "\\",
    "\n", "\0", "\ud800",
])  # fmt: skip
_TEXTS = st.text(max_size=60) | st.lists(_WORDS, max_size=14).map(" ".join)


@settings(deadline=None)
@given(_TEXTS)
def test_any_text_is_a_filter_or_refused(text: str) -> None:
    try:
        again = parsed(text)
    except InvalidInputError:
        return
    assert str(parsed(again.text).where) == str(again.where)
