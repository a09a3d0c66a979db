"""The tools, implemented with a client.

Rule 1. The host's configured memory is created on first use; any other must exist.
Rule 2. Content is returned only in fields of results, never in instructions or descriptions.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime
from typing import Literal

from memstream import errors
from memstream.client import Client
from memstream.mcp.schema import (
    After,
    By,
    Corrected,
    Earlier,
    Forgotten,
    History,
    Id,
    Ids,
    Importance,
    Interpreted,
    Key,
    Listing,
    ListLimit,
    Memories,
    Memory,
    Metadata,
    NewWords,
    Observed,
    OfRole,
    OfSession,
    OfSpeaker,
    Query,
    Recalled,
    RecallLimit,
    Receipt,
    ReceiptId,
    Receipts,
    ReceiptsLimit,
    Recollections,
    Remembered,
    Replayed,
    Said,
    Session,
    Since,
    Speaker,
    Talk,
    TimeZone,
    TokenBudget,
    TurnContext,
    Until,
    Where,
    With,
    Words,
    earlier_fields,
    recalled_fields,
    receipt_fields,
    remembered_fields,
)
from memstream.times import read_time
from memstream.values import AckLevel, Filter, Fragment, MetadataValue, Observation, RecallOptions, Role

RELATED = 3
"""Earlier statements that observe returns."""
PAGE = 1_000
"""Page size at the server when a page starts in the middle."""


class Tools:
    """The tools; `advice` turns a MemstreamError of theirs into text for the model."""

    def __init__(self, client: Client, path: str, target: str = "the server") -> None:
        self.path = client.memory(path).path
        self._client = client
        self._target = target
        self._made = False

    async def observe(
        self,
        content: Words,
        speaker: Speaker = "",
        role: OfRole = "",
        session: Session = "",
        importance: Importance = None,
        metadata: Metadata = None,
        key: Key = "",
        memory: Memory = "",
    ) -> Observed:
        """Remember something. It is stored when this returns, and every later recall can find it."""
        given: dict[str, MetadataValue] = dict(metadata or {})
        observation = Observation(
            content,
            speaker=speaker,
            role=Role(role) if role else None,
            session=session,
            importance=importance,
            metadata=given,
            external_id=key,
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
        importance: Importance = None,
        metadata: Metadata = None,
        memory: Memory = "",
    ) -> Observed:
        """Remember a fact that has changed, or name the fragment that has it: recall returns the new one from now on,
        and no longer the old ones."""
        if bool(content) == bool(by):
            raise errors.InvalidArgument("content", "either content or by says what is true now")
        if by:
            await self._client.memory(await self._resolve_memory(memory)).supersede(ids, newer_id=by)
            return Observed(id=by, outcome="corrected", related=[])
        given: dict[str, MetadataValue] = dict(metadata or {})
        observation = Observation(
            content,
            speaker=speaker,
            role=Role(role) if role else None,
            session=session,
            importance=importance,
            metadata=given,
            supersedes=ids,
        )
        return await self._observe(observation, memory)

    async def _observe(self, observation: Observation, memory: str) -> Observed:
        path = await self._resolve_memory(memory)
        to = self._client.memory(path)
        done = await to.observe_batch([observation], ack_level=AckLevel.STORED, related=RELATED)
        for refused in done.rejected:
            raise refused.error
        became = done.outcomes[0]
        if became.other_id:
            return Observed(id=became.other_id, outcome="repeated", related=[])
        if became.tier is None:
            return Observed(id=became.fragment_id, outcome="not_kept", related=[])
        related: list[Said] = []
        for each in became.related:
            with suppress(errors.FragmentNotFound):  # it has left the memory since
                one = await to.get_fragment(each.fragment_id)
                related.append(Said(id=one.id, content=one.content, time=one.observe_time))
        outcome: Literal["updated", "remembered"] = "updated" if became.type == "updated" else "remembered"
        return Observed(id=became.fragment_id, outcome=outcome, related=related)

    async def recall(
        self,
        query: Query,
        limit: RecallLimit = 10,
        speaker: OfSpeaker = "",
        session: OfSession = "",
        since: Since = None,
        until: Until = None,
        metadata: With = None,
        memory: Memory = "",
        time_zone: TimeZone = "",
        memories: Memories = None,
        where: Where = "",
    ) -> Recollections:
        """Ask what is remembered about something; returns the best answers first, and recent fragments.

        Times in the query, such as "last week", are understood."""
        options = RecallOptions(
            limit=limit, filter=_filter(speaker, session, since, until, metadata, time_zone, where), time_zone=time_zone
        )
        if memories:
            path = ", ".join(memories)
            answer = await self._client.recall_once(
                [await self._resolve_memory(each) for each in memories], query, **options
            )
        else:
            path = await self._resolve_memory(memory)
            answer = await self._client.memory(path).recall_once(query, **options)
        found = [Recalled(**recalled_fields(hit)) for hit in answer]
        ranked = {one.id for hit in answer for one in hit.fragments}
        working = [Remembered(**remembered_fields(one)) for one in answer.working_memory if one.id not in ranked]
        return Recollections(
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

    async def context(
        self,
        question: Query,
        conversation: Talk = "",
        budget: TokenBudget = 2_000,
        memory: Memory = "",
        time_zone: TimeZone = "",
    ) -> TurnContext:
        """What to know before answering a question: what is remembered about it, in the order of time, with dates, and
        the end of a conversation; as one text within a budget of tokens."""
        path = await self._resolve_memory(memory)
        made = await self._client.context(
            [path], question, conversation=conversation, budget=budget, time_zone=time_zone
        )
        return TurnContext(memory=path, text=made.text, tokens=made.tokens, weak=made.weak, incomplete=made.degraded)

    async def history(self, id: Id, memory: Memory = "") -> History:
        """Show what one fragment said before it was changed, the latest version first."""
        path = await self._resolve_memory(memory)
        found = await self._client.memory(path).fragment_history(id)
        versions = [
            Earlier(version=one.version, replaced=one.replace_time, by=one.principal, **earlier_fields(one.fragment))
            for one in found.versions
        ]
        return History(current=Remembered(**remembered_fields(found.fragment)), versions=versions)

    async def receipts(self, limit: ReceiptsLimit = 20, memory: Memory = "") -> Receipts:
        """List earlier recalls that asked for a receipt, the latest first: what was asked, and which fragments came."""
        path = await self._resolve_memory(memory)
        found: list[Receipt] = []
        async for one in self._client.memory(path).list_receipts(page_size=limit + 1):
            if len(found) == limit:
                return Receipts(memory=path, receipts=found, more=True)
            found.append(Receipt(**receipt_fields(one)))
        return Receipts(memory=path, receipts=found, more=False)

    async def replay(self, id: ReceiptId, memory: Memory = "") -> Replayed:
        """Answer the query of a receipt again, from the memory as it was then; says whether the ranking is the same."""
        path = await self._resolve_memory(memory)
        found = await self._client.memory(path).replay(id)
        return Replayed(
            receipt=Receipt(**receipt_fields(found.receipt)),
            same=found.same,
            recollections=[Recalled(**recalled_fields(hit)) for hit in found.answer or ()],
            differences=[
                " ".join(filter(None, (one.type.replace("_", " "), one.fragment_id, one.recorded, one.present)))
                for one in found.differences
            ],
        )

    async def forget(self, ids: Ids, memory: Memory = "") -> Forgotten:
        """Take fragments out of the memory by id, for instance because they are wrong or the user asks for it."""
        path = await self._resolve_memory(memory)
        return Forgotten(forgotten=await self._client.memory(path).forget_fragments(ids))

    async def list(
        self,
        limit: ListLimit = 50,
        after: After = "",
        speaker: OfSpeaker = "",
        session: OfSession = "",
        since: Since = None,
        until: Until = None,
        metadata: With = None,
        memory: Memory = "",
        time_zone: TimeZone = "",
        where: Where = "",
    ) -> Listing:
        """List everything that is remembered, page by page. To find something, use recall."""
        path = await self._resolve_memory(memory)
        page: list[Fragment] = []
        begun = not after
        listing = self._client.memory(path).list_fragments(
            _filter(speaker, session, since, until, metadata, time_zone, where), page_size=PAGE if after else limit + 1
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
        return Listing(memory=path, fragments=kept, more=len(page) > limit, unmatched=unmatched)

    async def _resolve_memory(self, named: str) -> str:
        if named and named != self.path:
            return self._client.memory(named).path
        if not self._made:
            await self._client.create_memory(self.path, exist_ok=True)
            self._made = True
        return self.path

    def advice(self, error: errors.MemstreamError) -> str:
        """The error and what to do about it, for a model to read."""
        if isinstance(error, errors.MemoryNotFound):
            self._made = False
            return f"{error.message}; leave `memory` out for {self.path}, or ask for the right name"
        if isinstance(error, errors.Unavailable) and not error.reason:
            return f"no memstream server answers at {self._target}; it must be started, then try again"
        if isinstance(error, errors.Transient):
            wait = f" in {error.retry_after} s" if error.retry_after else " later"
            return f"{error.message}; try again{wait}"
        return error.summary()


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
        return read_time(value, time_zone, until=name == "until")
    except ValueError as error:
        raise errors.InvalidArgument(name, str(error)) from error
