"""`replaydb episodes`: list and show episodes, down to single tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

import replaydb as rdb
from replaydb.cli.console import (
    BufferName,
    Json,
    Tokenizer,
    Url,
    finite,
    print_fields,
    print_json,
    print_list,
    print_more,
    print_table,
    print_text,
    with_buffer,
)
from replaydb.cli.selecting import (
    DEFAULT_LIMIT,
    AfterGroup,
    Ascending,
    GroupName,
    Limit,
    Runs,
    Selection,
    Sort,
    Statuses,
    Tasks,
    Where,
    condition,
    info_of,
    ordered,
    with_known,
)
from replaydb.domain.decoding import decoder, token_columns
from replaydb.domain.episodes.turns import MARKS
from replaydb.domain.episodes.unrepeated import Unrepeated
from replaydb.errors import (
    CorruptPayloadError,
    InvalidInputError,
    PayloadGoneError,
    UnknownGroupError,
)

if TYPE_CHECKING:
    from replaydb import Buffer, Episode, StoredGroup, Turn

app = typer.Typer(help="List and show episodes.", no_args_is_help=True)

#: Number of groups that a list reads at once.
PAGE = 16
#: Maximum number of positions in an error.
SHOWN_POSITIONS = 16

#: Characters of a text that a table shows.
SHOWN_CHARACTERS = 60


@app.command("list")
def list_(
    url: Url,
    buffer: BufferName,
    task: Tasks = None,
    status: Statuses = None,
    run: Runs = None,
    min_reward: Annotated[
        float | None, typer.Option(callback=finite, help="Minimum reward of an episode.")
    ] = None,
    max_reward: Annotated[
        float | None, typer.Option(callback=finite, help="Maximum reward of an episode.")
    ] = None,
    where: Where = None,
    sort: Sort = "id",
    ascending: Ascending = False,
    limit: Limit = DEFAULT_LIMIT,
    after: AfterGroup = None,
    as_json: Json = False,
) -> None:
    """List episodes, group by group; omits groups without stored tokens.

    --sort and --after apply to groups, --min-reward and --max-reward to episodes. All matching
    episodes of the last group are listed, so there may be more than --limit rows.
    """
    from replaydb.database.filters.compiling import all_of

    given = [
        condition(where),
        None if min_reward is None else rdb.col.reward_max >= min_reward,
        None if max_reward is None else rdb.col.reward_min <= max_reward,
    ]
    wanted = all_of(given)
    which = Selection(task, status, run, wanted, ordered(sort, ascending), after)

    def is_wanted(one: Episode) -> bool:
        if min_reward is max_reward is None:
            return True
        least = -math.inf if min_reward is None else min_reward
        most = math.inf if max_reward is None else max_reward
        return one.reward is not None and least <= one.reward <= most

    found, last = with_known(
        url,
        buffer,
        lambda buffer: _find(buffer, which, is_wanted, limit),
        tasks=task,
        runs=run,
    )
    if as_json:
        print_json([{"group_id": id_, "position": i, **facts_of(one)} for id_, i, one in found])
        return
    print_list(
        ("group", *FIELDS),
        [(id_, *row_of(i, one)) for id_, i, one in found],
        spare=("policy versions", "loss tokens", "turns", "advantage", "tokens", "finish reason"),
        cut=("text",),
    )
    if last is not None:
        print_more(last)


@app.command()
def show(
    url: Url,
    buffer: BufferName,
    group: GroupName,
    position: Annotated[
        int, typer.Argument(min=0, help="Position of the episode in its group, from 0.")
    ],
    tokenizer: Tokenizer = None,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Print every token, one for each line.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show an episode: its text or decoded tokens, its turns, and with --tokens every token.

    Extras are read and printed with --tokens or --json.
    """
    decode = None if tokenizer is None else decoder(tokenizer)
    fields = None if tokens or as_json else ()
    group_id, one = with_buffer(url, buffer, lambda buffer: _one(buffer, group, position, fields))
    row = Unrepeated(one)
    facts = {"group_id": group_id, "position": position, **facts_of(one)}
    if decode is not None:
        facts["prompt"] = decode(one.prompt_ids.tolist())
        facts["response"] = decode(row.token_ids(one.prompt_length).tolist())
    columns = token_columns(row, decode) if tokens else {}
    turns = list(map(_turn, one.turns, row.parents))
    if as_json:
        facts |= {"extras": values_of(one.extras), "turns": turns}
        print_json({**facts, "tokens": columns} if tokens else facts)
        return
    texts = {name: facts.pop(name) for name in ("text", "prompt", "response") if name in facts}
    print_fields({**facts, "extras": shapes_of(one.extras)} if tokens else facts)
    if turns:
        print_table(
            ("turn", *TURN_FIELDS),
            [(i, *(turn[name] for name in TURN_FIELDS)) for i, turn in enumerate(turns)],
        )
    if tokens:
        print_table(tuple(columns), list(zip(*columns.values(), strict=True)))
    if decode is not None:
        del texts["text"]
    elif one.text is None:
        typer.echo("no text stored; --tokenizer PATH decodes the tokens")
        del texts["text"]
    for name, text in texts.items():
        typer.echo(f"{name}:")
        print_text(text)


async def _find(
    buffer: Buffer, which: Selection, is_wanted: Callable[[Episode], bool], limit: int
) -> tuple[list[tuple[int, int, Episode]], int | None]:
    """Return (group id, position, episode) rows, and the last group id if there may be more."""
    found: list[tuple[int, int, Episode]] = []
    last: int | None = None
    page = await which.page(buffer, PAGE)
    while page:
        stored = {group.id: group for group in await _readable(buffer, [one.id for one in page])}
        for info in page:
            if len(found) >= limit:
                return found, last
            last = info.id
            if info.id in stored:
                episodes = placed(stored[info.id])
                found += [(info.id, at, one) for at, one in episodes if is_wanted(one)]
        page = await which.page(buffer, PAGE, page[-1])
    return found, None


async def _readable(buffer: Buffer, ids: list[int]) -> Sequence[StoredGroup]:
    try:
        return await buffer.get(ids, fields=())
    except (CorruptPayloadError, PayloadGoneError, UnknownGroupError) as error:
        return [] if error.batch is None else error.batch.groups


async def _one(
    buffer: Buffer, group: str, position: int, fields: Collection[str] | None
) -> tuple[int, Episode]:
    info = await info_of(buffer, group)
    [stored] = await buffer.get([info.id], fields=fields)
    if position not in stored.positions:
        shown = ", ".join(map(str, stored.positions[:SHOWN_POSITIONS])) or "none"
        more = ", ..." if len(stored.positions) > SHOWN_POSITIONS else ""
        expected = f"a position of the group with an episode ({shown}{more})"
        raise InvalidInputError("position", expected, position)
    return info.id, dict(placed(stored))[position]


def placed(group: StoredGroup) -> Iterable[tuple[int, Episode]]:
    """Return the episodes of a group with their positions, of which some may have no episode."""
    return zip(group.positions, group.episodes, strict=True)


def values_of(extras: Mapping[str, Any]) -> dict[str, Any]:
    """Convert named arrays to nested lists."""
    return {name: values.tolist() for name, values in extras.items()}


def shapes_of(extras: Mapping[str, Any]) -> dict[str, str]:
    """Return the dtype and shape of each named array, as text."""
    return {name: f"{values.dtype} {list(values.shape)}" for name, values in extras.items()}


#: Columns of the table of turns.
TURN_FIELDS = (
    *("num_prompt_tokens", "num_response_tokens", "reward", "finish_reason", "parent", "metadata"),
)


def _turn(turn: Turn, parent: int) -> dict[str, Any]:
    """Return a turn without its tokens. `parent`: index of its parent, -1 for none."""
    rewards, version = turn.token_rewards, turn.policy_version
    return {
        "num_prompt_tokens": turn.segment.prompt_length,
        "num_response_tokens": len(turn.response_ids),
        "parent": None if parent < 0 else parent,
        "reward": turn.reward,
        "token_rewards": None if rewards is None else rewards.tolist(),
        "policy_version": version if isinstance(version, int | None) else version.tolist(),
        "finish_reason": turn.finish_reason,
        "metadata": turn.metadata,
        **{name: getattr(turn, name) for name in MARKS},
    }


#: Attributes of an episode that are columns of a table, and others that are shown for one episode.
_NUMBERS = ("reward", "advantage", "num_tokens", "num_loss_tokens", "num_turns")
_FACTS = ("min_policy_version", "max_policy_version", "finish_reason", "metadata", "text")

FIELDS = (
    "position",
    "reward",
    "advantage",
    "tokens",
    "loss tokens",
    "turns",
    "policy versions",
    "finish reason",
    "text",
)


def row_of(position: int, one: Episode) -> tuple[object, ...]:
    """Return the row of an episode in a table."""
    oldest, newest = one.min_policy_version, one.max_policy_version
    text = one.text
    if text is not None and len(text) > SHOWN_CHARACTERS:
        text = f"{text[:SHOWN_CHARACTERS]} ..."
    numbers = (getattr(one, name) for name in _NUMBERS)
    versions = oldest if oldest == newest else f"{oldest}-{newest}"
    return position, *numbers, versions, one.finish_reason, text


def facts_of(one: Episode) -> dict[str, Any]:
    """Return an episode without its tokens."""
    return {name: getattr(one, name) for name in (*_NUMBERS, *_FACTS)}
