"""`memstream recall`: one query, its ranked answer and explanation; with --follow, changes of the answer.
`memstream context`: what a model would see before a turn, with the tokens of its parts.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar, cast

import click
from rich.console import Console
from rich.text import Text

from memstream.answer_values import Answer, Explanation, InterpretedTime, Recollection
from memstream.client import Client
from memstream.context import Context, ContextOptions, ContextReason, Omission
from memstream.recall import RecallStream
from memstream.standing import AnswerChange
from memstream.values import Filter, RecallOptions, Scope, Truth, TruthStatus, Weights
from memstream_server.cli.failures import Misuse
from memstream_server.cli.options import (
    LabelParam,
    TimeParam,
    as_of_option,
    filter_options,
    json_option,
    time_zone_option,
)
from memstream_server.cli.output import (
    create_table,
    escape_line,
    escape_text,
    format_time,
    fragment_text,
    open_console,
    print_json,
    print_parts,
)
from memstream_server.cli.server import Server, server_options

_WORDS_SHOWN = 1_000
_NEAR_MISSES = 10
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class _Target:
    """The memory that is asked, or several."""

    memory: str
    scopes: tuple[Scope, ...]
    partial: bool

    def open(self, client: Client) -> RecallStream:
        return client.recall(self.scopes, partial=self.partial) if self.scopes else client.memory(self.memory).recall()

    async def recall(self, client: Client, query: str, options: RecallOptions) -> Answer:
        if self.scopes:
            return await client.recall_once(self.scopes, query, partial=self.partial, **options)
        return await client.memory(self.memory).recall_once(query, **options)


def _target_options(command: F) -> F:
    """Adds the memory or memories, the query and the weights, as the arguments `asked` and `weights`."""

    @click.argument("words", nargs=-1, required=True, metavar="[MEMORY] QUERY")
    @click.option(
        "--memory",
        "memories",
        multiple=True,
        metavar="NAMESPACE/NAME[=WEIGHT]",
        help="One of several memories, in place of MEMORY (may be repeated). The score times the weight ranks.",
    )
    @click.option(
        "--prefix",
        "prefixes",
        multiple=True,
        metavar="TEXT[=WEIGHT]",
        help="All memories whose NAMESPACE/NAME begins with this (may be repeated).",
    )
    @click.option("--label", "labels", multiple=True, type=LabelParam(), help="All memories with these labels.")
    @click.option("--partial", is_flag=True, help="Leave out memories that do not exist or that you may not recall.")
    @click.option("--alpha", type=click.FloatRange(0, 100), help="Weight of recency.")
    @click.option("--beta", type=click.FloatRange(0, 100), help="Weight of relevance.")
    @click.option("--gamma", type=click.FloatRange(0, 100), help="Weight of importance.")
    @functools.wraps(command)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        scopes = _list_scopes(kwargs.pop("memories"), kwargs.pop("prefixes"), kwargs.pop("labels"))
        asked = _read_target(kwargs.pop("words"), scopes, kwargs.pop("partial"), kwargs["min_revision"])
        weights = Weights(kwargs.pop("alpha"), kwargs.pop("beta"), kwargs.pop("gamma"))
        return command(*args, asked=asked, weights=weights, **kwargs)

    return cast("F", wrapper)


@click.command("recall", short_help="Query a memory.")
@_target_options
@click.option(
    "-n", "--limit", type=click.IntRange(min=1), help="Maximum number of recollections. Default: the memory's policy."
)
@click.option("--explain", is_flag=True, help="Show the parts of each score, and near misses.")
@click.option("--working", is_flag=True, help="Also show the working memory (the short-term tier).")
@filter_options
@click.option("--min-relevance", type=click.FloatRange(0, 1), help="Minimum relevance of a recollection.")
@click.option(
    "--now",
    type=TimeParam(),
    metavar="TIME",
    help="Reference time of recency and of phrases of time. Default: the server's clock.",
)
@time_zone_option(of='Time zone of dates, and of phrases such as "yesterday"', expose=True)
@click.option(
    "--interpret-time/--no-interpret-time", default=None, help="Interpret phrases of time in QUERY. Default: on."
)
@click.option(
    "--weak-below",
    type=click.FloatRange(0, 1),
    help="Best relevance below which the answer is marked weak. Default: the memory's policy.",
)
@as_of_option
@click.option(
    "--token-budget",
    type=click.IntRange(min=0),
    default=0,
    help="Maximum number of tokens in the whole answer; 0: no limit.",
)
@click.option("--min-revision", type=click.IntRange(min=0), default=0, help="Wait until this revision is visible.")
@click.option(
    "--reinforce/--no-reinforce", default=None, help="Reinforce the recollections. Default: the memory's policy."
)
@click.option(
    "--fold/--no-fold", default=None, help="Rank fragments with the same content as one. Default: the memory's policy."
)
@click.option(
    "--truth",
    type=click.Choice([each.value for each in Truth]),
    help="Only current fragments, or superseded and not valid ones too. Default: the memory's policy.",
)
@click.option("--all", "everything", is_flag=True, help="The same as --truth all.")
@click.option("--receipt", is_flag=True, help="Keep a receipt, which `memstream replay` ranks again.")
@click.option(
    "-f", "--follow", is_flag=True, help="Show what enters, changes in and leaves the answer, until interrupted."
)
@server_options
@json_option
def recall_command(
    asked: tuple[_Target, str],
    weights: Weights,
    limit: int | None,
    explain: bool,
    working: bool,
    chosen: Filter | None,
    min_relevance: float | None,
    now: datetime | None,
    time_zone: str | None,
    interpret_time: bool | None,
    weak_below: float | None,
    as_of: int | datetime | None,
    token_budget: int,
    min_revision: int,
    reinforce: bool | None,
    fold: bool | None,
    truth: str | None,
    everything: bool,
    receipt: bool,
    follow: bool,
    server: Server,
    as_json: bool,
) -> None:
    """Recall what MEMORY (NAMESPACE/NAME) knows about QUERY, best first.

    Without MEMORY, --memory, --prefix and --label name several memories, which make one ranking.

    With --explain, each score is shown as a sum: value x weight of every part.

    \b
      memstream recall demo/joy "what is my name?"
      memstream recall demo/joy "when does the train leave?" -n 3 --explain
      memstream recall demo/joy "what did we decide?" --speaker Bob --since 7d --metadata project=apollo
      memstream recall demo/joy "where does Ann live?" --all
      memstream recall demo/joy "what did we do last week?" --time-zone Europe/Berlin
      memstream recall demo/joy "what is my name?" --json | jq -r '.recollections[0].fragment.content'
      memstream recall demo/joy "where is the key?" -n 3 --follow
      memstream recall --memory user/bob --memory team/core=0.5 "where do we meet?"

    With --follow, each change prints as lines with "+" (entered), "~" (changed) and "-" (left), or as a JSON object.
    """
    target, query = asked
    _check_follow(follow, working or bool(reinforce), as_of is not None, receipt)
    options = RecallOptions(
        explain=explain,
        near_misses=_NEAR_MISSES if explain else 0,
        omit_working_memory=not working,
        token_budget=token_budget,
        min_revision=min_revision,
        weights=weights,
        limit=limit,
        min_relevance=min_relevance,
        filter=chosen,
        now=now,
        as_of=as_of,
        reinforce=reinforce,
        fold=fold,
        time_zone=time_zone,
        interpret_time=interpret_time,
        weak_below=weak_below,
        truth=_wanted_truth(truth, everything),
        receipt=receipt,
    )
    if follow:
        with contextlib.suppress(KeyboardInterrupt):  # the normal end
            server.run_with_client(lambda client: _follow_answer(target.open(client), query, options, as_json))
        return
    answer = server.run_with_client(lambda client: target.recall(client, query, options))
    print_json(answer) if as_json else print_answer(answer, explain, working)


def _list_scopes(memories: Sequence[str], prefixes: Sequence[str], labels: Sequence[tuple[str, str]]) -> list[Scope]:
    found = [Scope(memory=text, weight=weight) for text, weight in map(_split_weight, memories)]
    found += [Scope(prefix=text, weight=weight) for text, weight in map(_split_weight, prefixes)]
    return [*found, Scope(labels=dict(labels))] if labels else found


def _split_weight(text: str) -> tuple[str, float | None]:
    name, equals, weight = text.partition("=")
    try:
        return name, float(weight) if equals else None
    except ValueError:
        raise Misuse(f"{weight!r} is no weight: write {name}=0.5 for instance") from None


def _read_target(
    words: Sequence[str], scopes: Sequence[Scope], partial: bool, min_revision: int
) -> tuple[_Target, str]:
    """(what is asked, the query). Raises Misuse."""
    if len(words) != (1 if scopes else 2):
        if scopes:
            raise Misuse("--memory, --prefix and --label name the memories: give QUERY alone, in quotes")
        raise Misuse("Missing argument 'QUERY'" if len(words) < 2 else "give MEMORY and QUERY: put QUERY into quotes")
    if scopes and min_revision:
        raise Misuse("--min-revision is of one memory: omit it, or name MEMORY")
    if partial and not scopes:
        raise Misuse("--partial is for several memories: name them with --memory, --prefix or --label")
    return _Target("" if scopes else words[0], tuple(scopes), partial), words[-1]


def _wanted_truth(truth: str | None, everything: bool) -> Truth | None:
    if everything and truth == Truth.CURRENT:
        raise Misuse("--all contradicts --truth current: give one of them")
    if everything:
        return Truth.ALL
    return None if truth is None else Truth(truth)


def _check_follow(follow: bool, extra: bool, past: bool, receipt: bool) -> None:
    if not follow:
        return
    if receipt:
        raise Misuse("--follow shows changes, and a receipt is of one answer: omit --receipt")
    if past:
        raise Misuse("--follow shows changes, and the past has none: omit --as-of")
    if extra:
        raise Misuse("--follow shows no working memory and reinforces nothing: omit --working and --reinforce")


async def _follow_answer(stream: RecallStream, query: str, options: RecallOptions, as_json: bool) -> None:
    known: dict[str, Recollection] = {}
    async with stream as recalls, recalls.subscribe(query, **options) as changes:
        async for change in changes:
            if as_json:
                print_json(change)
            else:
                _print_change(change, known)
            known = {hit.fragment.id: hit for hit in change.answer}


def _print_change(change: AnswerChange, known: Mapping[str, Recollection]) -> None:
    out = open_console()
    marked = [("-", "red", known[id_]) for id_ in change.retracted]
    marked += [("~", "yellow", hit) for hit in change.changed] + [("+", "green", hit) for hit in change.entered]
    for mark, style, hit in marked:
        print_parts(
            out, Text(f"{mark} {hit.score:.3f}  ", style=style) + escape_line(fragment_text(hit.fragment), _WORDS_SHOWN)
        )
        if hit.explanation is not None and mark != "-":
            print_parts(out, Text(f"  {format_score(hit.explanation)}", style="cyan"))
    if change.answer.degraded:
        print_parts(out, Text(f"degraded: {change.answer.degraded}", style="yellow"))


def print_answer(answer: Answer, explain: bool, working: bool) -> None:
    """Prints the ranking as a table, then the parts of --explain and --working, then a line of figures."""
    out = open_console()
    if answer.recollections:
        grid = create_table(
            "#", "score", "relevance", "recollection", numbers=["#", "score", "relevance"], wide="recollection"
        )
        for hit in answer:
            grid.add_row(str(hit.rank), f"{hit.score:.3f}", f"{hit.relevance:.3f}", _format_hit(hit))
        print_parts(out, grid)
    else:
        print_parts(out, "nothing recalled")
    if explain:
        _print_near_misses(out, answer)
    if working:
        _print_working_memory(out, answer)
    for one in answer.unmatched:
        print_parts(out, Text("filter: ", style="yellow") + escape_line(str(one), _WORDS_SHOWN))
    for each in answer.interpreted:
        print_parts(out, Text("interpreted: ", style="dim") + escape_line(format_interpreted(each), _WORDS_SHOWN))
    print_parts(out, Text(format_figures(answer), style="dim"))
    if answer.degraded:
        print_parts(out, Text(f"degraded: {answer.degraded}", style="yellow"))


def _format_hit(hit: Recollection) -> Text:
    fragment = hit.fragment
    source = " · ".join(
        part for part in (hit.memory, format_time(fragment.observe_time), fragment.speaker, fragment.session) if part
    )
    lines = [Text(escape_text(source).plain, style="dim")] if source else []
    lines.append(escape_text(fragment_text(fragment), _WORDS_SHOWN))
    if hit.folded_ids:
        lines.append(Text(f"(+{len(hit.folded_ids):,} alike)", style="dim"))
    if hit.status not in (TruthStatus.CURRENT, TruthStatus.UNKNOWN):
        by = f" by {fragment.superseded_by}" if hit.status is TruthStatus.SUPERSEDED else ""
        lines.append(Text(f"({hit.status.value.replace('_', ' ')}{by})", style="yellow"))
    if hit.truncated:
        lines.append(Text("(truncated to fit the token budget)", style="dim"))
    if hit.explanation is not None:
        lines.append(Text(format_score(hit.explanation), style="cyan"))
    if hit.companion is not None:
        lines.append(Text("reply: ", style="dim") + _format_hit(hit.companion))
    return Text("\n").join(lines)


def format_score(explanation: Explanation) -> str:
    """The score as a sum, for instance "0.812 = lexical 0.900 x 0.45 + recency 0.500 x 0.02 (absolute/4)"."""
    total = sum(part.contribution for part in explanation.parts)
    parts = " + ".join(f"{part.name} {part.value:.3f} x {part.weight:g}" for part in explanation.parts)
    return f"{total:.3f} = {parts} ({explanation.formula})"


def _print_near_misses(out: Console, answer: Answer) -> None:
    if not answer.near_misses:
        return
    grid = create_table("came close", "removed by", "score", "relevance", numbers=["score", "relevance"])
    for miss in answer.near_misses:
        stage = f"{miss.stage} by {miss.superseded_by}" if miss.superseded_by else miss.stage
        grid.add_row(miss.fragment_id, stage, _format_number(miss.score), _format_number(miss.relevance))
    print_parts(out, grid)


def _print_working_memory(out: Console, answer: Answer) -> None:
    grid = create_table("perceived", "speaker", "working memory", wide="working memory")
    for fragment in answer.working_memory:
        content = escape_line(fragment_text(fragment), _WORDS_SHOWN)
        grid.add_row(format_time(fragment.observe_time), escape_line(fragment.speaker, 40), content)
    print_parts(out, grid if answer.working_memory else "working memory is empty")


def format_interpreted(time: InterpretedTime) -> str:
    """A phrase and its window, for instance '"last week" is 2023-11-06 00:00:00Z to 2023-11-13 00:00:00Z'."""
    begin, end = format_time(time.from_time), format_time(time.to_time)
    if begin and end:
        return f'"{time.phrase}" is {begin} to {end}'
    return f'"{time.phrase}" is from {begin} on' if begin else f'"{time.phrase}" is before {end}'


def format_figures(answer: Answer) -> str:
    """One line: the number of candidates, and the time taken."""
    took_s = sum(answer.timings.values())
    parts = [
        f"{len(answer):,} of {answer.eligible:,}, {answer.considered:,} considered",
        f"best relevance {answer.best_relevance:.3f}{' (weak)' if answer.weak else ''}",
        f"revision {answer.revision:,}",
        f"{took_s * 1e3:.1f} ms" if answer.timings else "",
        f"{answer.tokens:,} tokens" if answer.tokens else "",
        f"receipt {answer.receipt_id}" if answer.receipt_id else "",
    ]
    return " · ".join(part for part in parts if part)


def _format_number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


@click.command("context", short_help="Show what a model would see before a turn.")
@click.argument("question")
@click.option("-m", "--memory", "memories", multiple=True, metavar="NAMESPACE/NAME", help="Memory to recall from.")
@click.option("--conversation", default="", metavar="NAMESPACE/NAME", help="Conversation whose end is in the text.")
@click.option("--block", "blocks", multiple=True, metavar="NAMESPACE/MEMORY#NAME", help="Block at the beginning.")
@click.option("--summary", metavar="NAMESPACE/MEMORY#NAME", help="Block in place of the messages that are cut.")
@click.option("--budget", type=click.IntRange(min=0), default=0, help="Maximum number of tokens; 0 takes 4,000.")
@click.option("-n", "--limit", type=click.IntRange(min=1), help="Maximum number of new memories.")
@click.option("--now", type=TimeParam(), metavar="TIME", help="Time of the turn. Default: the server's clock.")
@time_zone_option(of="Time zone of dates", expose=True)
@server_options
@json_option
def context_command(
    question: str,
    memories: tuple[str, ...],
    conversation: str,
    blocks: tuple[str, ...],
    summary: str | None,
    budget: int,
    limit: int | None,
    now: datetime | None,
    time_zone: str | None,
    server: Server,
    as_json: bool,
) -> None:
    """Show the context of a turn with QUESTION, and the tokens of its parts. It records nothing.

    \b
      memstream context "what is my name?" -m demo/joy
      memstream context "what now?" -m user/bob -m team/core --conversation user/monday --block 'agent/joy#persona'
      memstream context "what is my name?" -m demo/joy --json | jq -r .text
    """
    options = ContextOptions(summary=summary, limit=limit, now=now, time_zone=time_zone, reinforce=False)
    context = server.run_with_client(
        lambda client: client.context(
            memories, question, conversation=conversation, blocks=blocks, budget=budget, **options
        )
    )
    print_json(_to_fields(context)) if as_json else _print_context(context)


def _to_fields(context: Context) -> dict[str, Any]:
    names = ("tokens", "weak", "degraded", "parts", "citations", "left_out")
    return {"text": context.text} | {name: getattr(context, name) for name in names}


def _print_context(context: Context) -> None:
    out = open_console()
    grid = create_table("part", "from", "tokens", numbers=["tokens"])
    for part in context.parts:
        print_parts(out, escape_text(part.text.removesuffix("\n")))
        source = (
            f"{part.memory}#{part.name}" if part.name else part.memory or (f"#{part.number}" if part.number else "")
        )
        grid.add_row(part.kind.value, source, f"{part.tokens:,}")
    print_parts(out, grid)
    print_parts(out, Text(f"{context.tokens:,} tokens", style="dim"))
    for reason, count in _count_reasons(context.left_out).items():
        print_parts(out, Text(f"left out: {count:,} ({reason.value.replace('_', ' ')})", style="dim"))
    if context.degraded:
        print_parts(out, Text("degraded: ", style="yellow") + escape_text(context.degraded))


def _count_reasons(left_out: tuple[Omission, ...]) -> dict[ContextReason, int]:
    counts: dict[ContextReason, int] = {}
    for one in left_out:
        counts[one.reason] = counts.get(one.reason, 0) + one.count
    return counts
