"""The tools, implemented with a client.

Rule 1. The host's configured memory is created on first use; any other must exist.
Rule 2. Content is returned only in results, never in instructions or descriptions.
Rule 3. The docstring of a tool is what a model reads: when to call it, and what not to store.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, Literal, TypeVar

from memstream import errors
from memstream.blocks import Blocks
from memstream.client import Client
from memstream.mcp.results import (
    ID_CHARS,
    Forgotten,
    Interpreted,
    Listing,
    Observed,
    Recalled,
    Recollections,
    Remembered,
    Said,
    TurnContext,
    recalled_fields,
    remembered_fields,
    short_id,
)
from memstream.mcp.schema import (
    FORGET_MAX,
    After,
    AfterTurn,
    All,
    AsOf,
    BlockNames,
    By,
    Confirm,
    Containing,
    Corrected,
    ForgetQuery,
    Ids,
    Importance,
    Key,
    ListLimit,
    Memories,
    Memory,
    Metadata,
    NewWords,
    OfRole,
    OfSession,
    OfSpeaker,
    Query,
    RecallLimit,
    Session,
    Since,
    Speaker,
    SummaryName,
    Talk,
    TimeZone,
    TokenBudget,
    Ttl,
    Until,
    ValidFrom,
    ValidUntil,
    When,
    Where,
    With,
    Words,
)
from memstream.mcp.turns import Turn, Turns
from memstream.times import read_time
from memstream.values import AckLevel, Filter, Fragment, MetadataValue, Observation, RecallOptions, Role, Truth

R = TypeVar("R")

RELATED = 5
"""Earlier statements that observe returns."""
PAGE = 1_000
"""Page size at the server when a page starts in the middle."""
KNOWN_IDS_MAX = 10_000
_END_OF_ID = re.compile(rf"[0-9A-HJKMNP-TV-Z]{{{ID_CHARS},25}}")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


class Tools:
    """The tools of one memory for one host; `advice` turns a MemstreamError of theirs into text for the model.

    `turns`: what its hosts have of contexts; only those of `caller` are found.
    """

    def __init__(
        self,
        client: Client,
        path: str,
        target: str = "the server",
        turns: Turns | None = None,
        caller: str = "",
    ) -> None:
        self.path = client.memory(path).path
        self._client = client
        self._turns = turns if turns is not None else Turns()
        self._caller = caller
        self._target = target
        self._ids: dict[str, str] = {}
        """Whole ids by their ends, as far as this host saw them; empty: of several ids."""

    @property
    def blocks(self) -> Blocks:
        """The memory's blocks."""
        return self._client.memory(self.path).blocks

    async def block_versions(self) -> dict[str, int]:
        """The versions of the blocks by name."""
        return {block.name: block.version async for block in self.blocks.list()}

    async def run(self, tool: Callable[..., Awaitable[R]], arguments: dict[str, Any]) -> R:
        """Calls a tool; creates the host's own memory if it does not exist yet."""
        try:
            return await tool(**arguments)
        except errors.MemoryNotFound:
            if arguments.get("memory") not in (None, self.path):
                raise
            await self._client.create_memory(self.path, exist_ok=True)
            return await tool(**arguments)

    async def observe(
        self,
        content: Words,
        speaker: Speaker = "",
        role: OfRole = "",
        session: Session = "",
        time: When = None,
        valid_from: ValidFrom = None,
        valid_until: ValidUntil = None,
        ttl: Ttl = "",
        importance: Importance = None,
        metadata: Metadata = None,
        key: Key = "",
        time_zone: TimeZone = "",
        memory: Memory = "",
    ) -> Observed:
        """Remember one fact that will matter in later conversations: who someone is, what they prefer, what was decided
        and why, how something is done here. Call it as soon as you learn it, once per fact. Do not store passwords,
        keys or tokens, what a file or a tool can tell again, or text that recall or context returned."""
        observation = _observation(content, speaker, role, session, importance, metadata)
        observation = replace(
            observation,
            external_id=key,
            observe_time=_read_time("time", time, time_zone),
            valid_from=_read_time("valid_from", valid_from, time_zone),
            valid_until=_read_time("valid_until", valid_until, time_zone),
            ttl=_read_span(ttl),
        )
        return await self._observe(observation, memory)

    async def correct(
        self,
        ids: Corrected,
        content: NewWords = "",
        by: By = "",
        speaker: Speaker = "",
        role: OfRole = "",
        session: Session = "",
        valid_from: ValidFrom = None,
        importance: Importance = None,
        metadata: Metadata = None,
        time_zone: TimeZone = "",
        memory: Memory = "",
    ) -> Observed:
        """Replace a remembered fact that has changed or was wrong. Call it when the user says something that
        contradicts what recall, context or observe returned. Recall then returns the new fact alone; the old one stays
        in the history."""
        if bool(content) == bool(by):
            raise errors.InvalidArgument("content", "either content or by says what is true now")
        path = self._resolve_memory(memory)
        old = await self._whole_ids(path, ids)
        if by:
            (newer,) = await self._whole_ids(path, [by])
            await self._client.memory(path).supersede(old, newer_id=newer)
            return Observed(id=newer, outcome="corrected", related=[])
        observation = _observation(content, speaker, role, session, importance, metadata)
        true_from = _read_time("valid_from", valid_from, time_zone)
        return await self._observe(replace(observation, supersedes=old, valid_from=true_from), memory)

    async def _observe(self, observation: Observation, memory: str) -> Observed:
        path = self._resolve_memory(memory)
        to = self._client.memory(path)
        done = await to.observe_batch([observation], ack_level=AckLevel.STORED, related=RELATED)
        for refused in done.rejected:
            raise refused.error
        became = done.outcomes[0]
        if became.other_id:
            return self._seen(Observed(id=became.other_id, outcome="repeated", related=[]), [became.other_id])
        if became.tier is None:
            return Observed(id=became.fragment_id, outcome="not_kept", related=[])
        related: list[Said] = []
        for each in became.related:
            with suppress(errors.FragmentNotFound):  # it has left the memory since
                one = await to.get_fragment(each.fragment_id)
                related.append(Said(id=one.id, content=one.content, time=one.observe_time))
        outcome: Literal["updated", "remembered"] = "updated" if became.type == "updated" else "remembered"
        result = Observed(id=became.fragment_id, outcome=outcome, related=related)
        return self._seen(result, [result.id, *(one.id for one in related)])

    async def recall(
        self,
        query: Query,
        limit: RecallLimit = 10,
        speaker: OfSpeaker = "",
        session: OfSession = "",
        since: Since = None,
        until: Until = None,
        metadata: With = None,
        where: Where = "",
        time_zone: TimeZone = "",
        as_of: AsOf = None,
        all: All = False,
        memory: Memory = "",
        memories: Memories = None,
    ) -> Recollections:
        """Search what is remembered. Call it before you answer anything that may depend on an earlier conversation, on
        the user, or on a decision made before, and before you ask the user again. The best come first; "last week" in
        the query is understood."""
        options = RecallOptions(
            limit=limit,
            filter=_filter(speaker, session, since, until, metadata, time_zone, where),
            time_zone=time_zone,
            as_of=_read_time("as_of", as_of, time_zone),
            truth=Truth.ALL if all else None,
        )
        if memories:
            path = ", ".join(memories)
            answer = await self._client.recall_once([self._resolve_memory(each) for each in memories], query, **options)
        else:
            path = self._resolve_memory(memory)
            answer = await self._client.memory(path).recall_once(query, **options)
        found = [Recalled(**recalled_fields(hit)) for hit in answer]
        ranked = {one.id for hit in answer for one in hit.fragments}
        working = [Remembered(**remembered_fields(one)) for one in answer.working_memory if one.id not in ranked]
        result = Recollections(
            memory=path,
            recollections=found,
            working_memory=working,
            weak=answer.weak,
            interpreted=[
                Interpreted(phrase=each.phrase, since=each.from_time, until=each.to_time) for each in answer.interpreted
            ],
            unmatched=list(map(str, answer.unmatched)),
            incomplete=answer.degraded,
        )
        return self._seen(result, [*ranked, *(one.id for one in working)])

    async def context(
        self,
        question: Query,
        conversation: Talk = "",
        blocks: BlockNames = None,
        summary: SummaryName = "",
        budget: TokenBudget = 2_000,
        after: AfterTurn = "",
        time_zone: TimeZone = "",
        memory: Memory = "",
    ) -> TurnContext:
        """What to know before a turn, as one text within a budget: blocks, the end of a conversation, and what is
        remembered about the question, with dates. Call it once when a task or a conversation begins, with what it is
        about, and again with after when the subject changes; use recall for single questions."""
        path = self._resolve_memory(memory)
        after = after.removeprefix("after=")  # as the text before ends
        key = (self._caller, path, conversation)
        known = self._turns.find(*key, after) if after else None
        made = await self._client.context(
            [path],
            question,
            conversation=conversation,
            blocks=[_block_path(path, name) for name in blocks or ()],
            summary=_block_path(path, summary) if summary else None,
            budget=budget,
            after=known.position if known is not None else None,
            time_zone=time_zone,
        )
        turn = Turn.of_context(made)
        self._turns.keep(turn, *key, turn.handle)
        new = made.parts if known is None else known.find_new(made)
        return TurnContext(
            memory=path,
            context="".join(part.text for part in new),
            tokens=sum(part.tokens for part in new),
            weak=made.weak,
            incomplete=made.degraded,
            withdrawn=known.find_withdrawn(made) if known is not None else [],
            unknown_after=after if known is None else "",
            after=turn.handle,
        )

    async def forget(
        self,
        ids: Ids = (),  # type: ignore[assignment]  # a model omits it
        query: ForgetQuery = "",
        confirm: Confirm = False,
        memory: Memory = "",
    ) -> Forgotten:
        """Take facts out of the memory, by id or by query. Call it when the user asks you to forget something, or when
        something should never have been stored. For a fact that has changed call correct."""
        if bool(ids) == bool(query):
            raise errors.InvalidArgument("ids", "either ids or query says what to forget")
        path = self._resolve_memory(memory)
        of = self._client.memory(path)
        if ids:
            return Forgotten(forgotten=await of.forget_fragments(await self._whole_ids(path, ids)))
        answer = await of.recall_once(query, limit=FORGET_MAX, truth=Truth.ALL, reinforce=False)
        # Recall fills its places with what shares little; that is not what the query means.
        near = [hit for hit in answer if hit.relevance >= answer.best_relevance / 2]
        hits = [] if answer.weak else [hit.fragment for hit in near]
        found = [Remembered(**remembered_fields(one)) for one in hits]
        done = await of.forget_fragments([one.id for one in hits]) if confirm and hits else 0
        result = Forgotten(forgotten=done, found=found, confirm=bool(found) and not confirm)
        return self._seen(result, [one.id for one in found])

    async def list(
        self,
        limit: ListLimit = 50,
        after: After = "",
        text: Containing = "",
        speaker: OfSpeaker = "",
        session: OfSession = "",
        since: Since = None,
        until: Until = None,
        metadata: With = None,
        where: Where = "",
        time_zone: TimeZone = "",
        memory: Memory = "",
    ) -> Listing:
        """List what is remembered in order of receipt, page by page. Call it when the user asks what you remember, or
        to tidy up. To find something, call recall."""
        path = self._resolve_memory(memory)
        after = (await self._whole_ids(path, [after]))[0] if after else ""
        page: list[Fragment] = []
        begun = not after
        listing = self._client.memory(path).list_fragments(
            _filter(speaker, session, since, until, metadata, time_zone, where),
            page_size=PAGE if after else limit + 1,
            text=text,
        )
        async for fragment in listing:
            if fragment.id == after:
                begun = True
                page.clear()
            # The listing is in order of receipt, ids nearly so: good enough if `after` no longer exists.
            elif len(page) <= limit and (begun or fragment.id > after):
                page.append(fragment)
            if begun and len(page) > limit:
                break
        kept = [Remembered(**remembered_fields(fragment)) for fragment in page[:limit]]
        unmatched = [str(one) for one in listing.unmatched]
        result = Listing(memory=path, fragments=kept, more=len(page) > limit, unmatched=unmatched)
        return self._seen(result, [one.id for one in kept])

    # ---- parts

    def _resolve_memory(self, named: str) -> str:
        return self._client.memory(named).path if named else self.path

    def _seen(self, result: R, ids: Iterable[str]) -> R:
        """Remembers the ids that a host is shown the ends of."""
        for id in ids:
            end = short_id(id)
            self._ids[end] = id if self._ids.get(end, id) == id else ""
        while len(self._ids) > KNOWN_IDS_MAX:
            del self._ids[next(iter(self._ids))]
        return result

    async def _whole_ids(self, path: str, given: Iterable[str]) -> tuple[str, ...]:
        """The whole ids; the server judges what is neither an id nor the end of one."""
        return tuple([self._ids.get(one) or await self._find_id(path, one) for one in given])

    async def _find_id(self, path: str, end: str) -> str:
        if not _END_OF_ID.fullmatch(end):
            return end
        found: set[str] = set()
        async for fragment in self._client.memory(path).list_fragments(text=end):
            if fragment.id.endswith(end):
                found.add(fragment.id)
        if len(found) != 1:
            raise errors.InvalidArgument("ids", f"{end} is the end of {'several ids' if found else 'no id'}")
        return found.pop()

    def advice(self, error: errors.MemstreamError) -> str:
        """The error and what to do about it, for a model to read."""
        if isinstance(error, errors.MemoryNotFound):
            return f"{error.message}; leave `memory` out for {self.path}, or ask for the right name"
        if isinstance(error, errors.Unavailable) and not error.reason:
            return f"no memstream server answers at {self._target}; it must be started, then try again"
        if isinstance(error, errors.Transient):
            wait = f" in {error.retry_after} s" if error.retry_after else " later"
            return f"{error.message}; try again{wait}"
        return error.summary()


def _observation(
    content: str, speaker: str, role: str, session: str, importance: float | None, metadata: Metadata
) -> Observation:
    given: dict[str, MetadataValue] = dict(metadata or {})
    return Observation(
        content,
        speaker=speaker,
        role=Role(role) if role else None,
        session=session,
        importance=importance,
        metadata=given,
    )


def _block_path(memory: str, name: str) -> str:
    return name if "#" in name else f"{memory}#{name}"


def _filter(
    speaker: str, session: str, since: str | None, until: str | None, metadata: With, time_zone: str, where: str
) -> Filter:
    return Filter(
        speakers=[speaker] if speaker else (),
        sessions=[session] if session else (),
        observe_time_min=_read_time("since", since, time_zone),
        observe_time_max=_read_time("until", until, time_zone),
        metadata={**(metadata or {})},
        expression=where,
    )


def _read_time(name: str, value: str | None, time_zone: str) -> datetime | None:
    if value is None:
        return None
    try:
        return read_time(value, time_zone, until=name in ("until", "valid_until"))
    except ValueError as error:
        raise errors.InvalidArgument(name, str(error)) from error


def _read_span(ttl: str) -> timedelta | None:
    return timedelta(**{_UNITS[ttl[-1]]: float(ttl[:-1])}) if ttl else None
