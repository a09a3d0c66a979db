"""Blocks that keep themselves: recalls their questions after commits, and writes what has changed.

Rule 1. A question is recalled when the memory's revision has risen since, or when a fragment of the answer expires or
becomes valid; at most once every PAUSE_US. The journal keeps how far a block is: nothing is lost by a crash.
Rule 2. A text is written again only if what it is made of has changed, after the question's interval at the earliest;
at once if a fragment that it was made of is gone or has changed.
Rule 3. A model that fails leaves the text, names the problem, and is tried again. A text that no longer holds is
replaced by what was found until then.
Rule 4. The journal takes a text only if all fragments that it was made of are there with the same words
(ports/blocks.py).
Rule 5. A question with scopes is a recall over several memories by who set it, with the rights of the moment. It waits
for the revisions that are read before it: the journal may be ahead of a memory in RAM, here or at another server. When
rights may have changed, all such questions are recalled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Protocol

import structlog

from memstream_server.core.budget import estimated_tokens
from memstream_server.core.context.texts import write_lines
from memstream_server.core.events import Purpose
from memstream_server.core.retention import expiry_us
from memstream_server.core.values import Fragment, TruthStatus
from memstream_server.engine.background.task import BackgroundTask, wait_for_news
from memstream_server.engine.errors import EngineError, EtagMismatch, MemoryNotFound, OwnedElsewhere, OwnerUnreachable
from memstream_server.engine.lifecycle import drop_expired
from memstream_server.engine.memory.decision import Decision, account_of
from memstream_server.engine.requests import Query, RecallAnswer
from memstream_server.ports.blocks import (
    NO_REVISION,
    AskedMemory,
    Block,
    BlockContent,
    BlockName,
    BlockStore,
    MemoryName,
    StandingAnswer,
    StandingQuestion,
    StandingState,
)
from memstream_server.ports.journal.errors import JournalError
from memstream_server.ports.models import Account, ModelError, ModelRefused, ModelUnavailable

if TYPE_CHECKING:
    from memstream_server.engine.blocks import Blocks
    from memstream_server.engine.memory.actor import Actor
    from memstream_server.engine.recall.recall import Recaller
    from memstream_server.engine.recall.scopes import ScopedQuery
    from memstream_server.engine.runtime.dependencies import EngineParts
    from memstream_server.engine.runtime.registry import Registry
    from memstream_server.ports.journal.records import MemoryRecord

log = structlog.get_logger(__name__)

PAUSE_US = 1_000_000
"""Between two recalls of a question: one covers a burst of commits."""
QUIET_S, IDLE_S = 5.0, 60.0
"""How often blocks are looked for that nothing announced: those of other servers, and, where no such block is known and
no other server writes, those that were imported."""
ROUND_PAUSE_S = 0.05
DUE_MAX = 100
TOKENS = 1_000
"""Of a text without a bound of its own."""
SHOWN_TOKENS, MEMORY_TOKENS = 12_000, 1_000
"""Of the memories that an LLM reads, and of one of them."""
_DIGEST_BYTES = 16
RETRY_US, RETRY_MAX_US = 1_000_000, 600_000_000
"""The first and the longest wait after a failure; each is twice the one before."""
DEGRADED_US = 10_000_000
"""After this, an answer that lacks a memory is asked again."""


class Asking(Protocol):
    """Recalls over several memories in the name of a principal."""

    @property
    def rights(self) -> object:
        """Another object once the rights of principals may have changed; None: everyone has all."""

    def ask_as(
        self, principal: str, question: StandingQuestion, asked: Sequence[AskedMemory]
    ) -> AbstractContextManager[ScopedQuery]:
        """The question's query, at the revisions of `asked` or later; within the context it is asked with the
        principal's rights. It leaves out memories that do not exist, or that the principal may not recall."""


@dataclass(frozen=True, slots=True, eq=False)
class _Found:
    """What the recall found, as it is shown, and what the text that is made of it is made of."""

    answer: RecallAnswer
    shown: Sequence[tuple[Fragment, str]]
    digest: bytes
    revision: int
    records: Mapping[str, MemoryRecord]
    """The memories that were asked, by path; the block's own by the empty one."""
    paths: Mapping[str, str]
    """The memory of each shown fragment."""
    asked: tuple[AskedMemory, ...] = ()
    """The memories of the scopes, as they were before."""
    problem: str = ""

    @property
    def contents(self) -> Mapping[str, Mapping[str, str]]:
        """What was shown, by id, by the uid of its memory."""
        found: dict[str, dict[str, str]] = {}
        for one, _ in self.shown:
            found.setdefault(self.record_of(one).uid, {})[one.id] = one.content
        return found

    def record_of(self, fragment: Fragment) -> MemoryRecord:
        """Its memory's."""
        return self.records[self.paths[fragment.id]]


class StandingBlocks(BackgroundTask):
    """One background task. The engine starts and stops it."""

    def __init__(self, parts: EngineParts, registry: Registry, recaller: Recaller, blocks: Blocks, model: str) -> None:
        """model: name of the LLM that answers; empty without one."""
        self._store = parts.storage.blocks
        self._journal = parts.storage.journal
        self._insights = parts.models.insights
        self._clock = parts.runtime.clock
        self._registry = registry
        self._recaller = recaller
        self._blocks = blocks
        self._model = model if parts.models.insights is not None else ""
        self.asking: Asking | None = None
        """Set before questions with scopes are asked."""
        self._rights: object = None
        """As of the last round."""
        self._news = asyncio.Event()
        self._failures: dict[tuple[str, str], int] = {}
        self.memories: frozenset[str] = frozenset()
        """Uids of those with blocks that keep themselves, and of those that they ask, as far as this process knows."""
        blocks.on_question = self.notify

    def notify(self) -> None:
        """A memory with such a block has changed, or a block has a question."""
        self._news.set()

    async def _run(self) -> None:
        while True:
            self._news.clear()
            wait_s = QUIET_S
            try:
                self.memories = await self._store.list_standing()
                next_us = await self._run_round() if self.memories else None
                if not self.memories and not self._registry.ownership.shared:
                    wait_s = IDLE_S
                if next_us is not None:
                    wait_s = min(QUIET_S, max(0, next_us - self._clock.now_us()) / 1e6)
            except (JournalError, EngineError) as error:
                log.warning("standing_blocks_failed", error=error)
            await asyncio.sleep(ROUND_PAUSE_S)
            await wait_for_news(self._news, wait_s)

    async def _run_round(self) -> int | None:
        """Renew what is due; the time at which more will be due without a commit."""
        if self.asking is not None and (rights := self.asking.rights) is not self._rights:
            await self._store.forget_asked()
            self._rights = rights
        tended = await self._registry.ownership.select_tended()
        own = await find_own_due(self._store, tended, self._clock.now_us())
        for uid, name in own:
            await self._renew_guarded(uid, name)
        if len(own) >= DUE_MAX:
            self.notify()  # more may be due now
        return (await self._store.find_due(self._clock.now_us(), DUE_MAX)).next_us

    async def _renew_guarded(self, uid: str, name: str) -> None:
        try:
            async with self._registry.use_uid(uid) as actor:
                await self._renew(actor, name)
        except (MemoryNotFound, OwnedElsewhere):
            return  # its owner does
        except EtagMismatch:
            self._news.set()  # written meanwhile, or its sources were: again
        except (ModelError, EngineError) as error:
            await self._note_failure(uid, name, error)
        except Exception as error:  # an unexpected error must not stop the other blocks
            if isinstance(error, JournalError):
                raise
            log.exception("standing_block_failed_unexpectedly")
            await self._note_failure(uid, name, error)
        else:
            self._failures.pop((uid, name), None)

    async def _note_failure(self, uid: str, name: str, error: Exception) -> None:
        failures = self._failures.get((uid, name), 0)
        self._failures[uid, name] = failures + 1
        again_us = self._clock.now_us() + min(RETRY_MAX_US, RETRY_US << min(failures, 20))
        problem = getattr(error, "summary", "") or getattr(error, "message", "") or type(error).__name__
        log.warning("standing_block_waits", failures=failures + 1, error=error)
        await self._store.set_state(uid, name, StandingState(-1, again_us, again_us, problem))

    async def _renew(self, actor: Actor, block_name: str) -> None:
        name = BlockName(MemoryName(actor.working.record.namespace, actor.working.record.name), block_name)
        block = (await self._blocks.read_many([name])).get(name)
        if block is None or block.content.standing is None:
            return
        standing = block.content.standing
        if standing.question.scopes and self.asking is None:
            return  # the server has just started
        found = await self._recall(actor, block, standing)
        now_us = self._clock.now_us()
        look_us = self._find_next_look(found)
        state = StandingState(found.revision, now_us + PAUSE_US, look_us, found.problem, found.asked)
        if found.digest == standing.digest:
            await self._store.set_state(actor.uid, block_name, state, block.version)
            return
        holds = await self._still_holds(block, standing, found.records)
        rest_us = block.update_time_us + standing.question.min_interval_us
        if holds and standing.digest and now_us < rest_us:
            state = StandingState(-1, now_us + PAUSE_US, rest_us)
            await self._store.set_state(actor.uid, block_name, state, block.version)
            return
        if found.answer.degraded and holds and block.content.text:
            raise ModelUnavailable(found.answer.degraded)
        try:
            content, held = await self._write(actor, block, standing, found)
        except ModelError:
            if holds and block.content.text:
                raise
            # without the model's name: it is not what the question asks for, and is written again
            await self._blocks.renew(name, block, self._show_found(block, standing, found), found.contents, state)
            raise
        await self._blocks.renew(name, block, content, found.contents, replace(state, revision=held))

    async def _recall(self, actor: Actor, block: Block, standing: StandingAnswer) -> _Found:
        question = standing.question
        if question.scopes:
            asked = await self._store.read_asked(actor.uid, block.name)
            records, answer = await self._ask_memories(actor, block, standing, asked)
            revision, alone = NO_REVISION, next(iter(records), "")
        else:
            query = Query(
                text=question.text,
                limit=question.limit,
                min_relevance=question.min_relevance,
                filter=question.filter,
                reinforce=False,
                working_memory=False,
            )
            asked, records, alone = (), {"": actor.working.record}, ""
            answer = await self._recaller.recall(actor, query)
            revision = answer.revision
        each = {
            shown.fragment.id: (shown.fragment, one.memory or alone)
            for one in answer.recollections
            for shown in (one, one.companion)
            if shown is not None and shown.status is TruthStatus.CURRENT
        }
        paths = {id_: path for id_, (_, path) in each.items()}
        shown = write_shown(question.text, [one for one, _ in each.values()], self._model, block.content.max_tokens)
        digest = digest_answer(question, self._model, block.content.max_tokens, shown, paths)
        missing = [path for one in question.scopes if (path := str(one.memory)) not in records]
        problem = f"left out: {', '.join(missing)}: no such memory, or {block.principal or 'nobody'} may not recall it"
        return _Found(answer, shown, digest, revision, records, paths, asked, problem if missing else "")

    async def _ask_memories(
        self, actor: Actor, block: Block, standing: StandingAnswer, revisions: Sequence[AskedMemory]
    ) -> tuple[dict[str, MemoryRecord], RecallAnswer]:
        """(the memories that were asked, by path; their answer). Without an answer, a text that no longer holds is
        emptied. Raises EngineError."""
        assert self.asking is not None
        with self.asking.ask_as(block.principal, standing.question, revisions) as query:
            asked = await query.find_memories()
            records = {one.path: one.record for one in asked}
            try:
                return records, await query.recall(asked, None)
            except EngineError as error:
                problem = OwnerUnreachable(error.message)  # the block's memory is here
        if block.content.text and not await self._still_holds(block, standing, records):
            emptied = replace(standing, citations=(), sources=(), memories=(), digest=b"")
            content = replace(block.content, text="", standing=emptied)
            name = BlockName(MemoryName(actor.working.record.namespace, actor.working.record.name), block.name)
            await self._blocks.renew(name, block, content, {}, StandingState())
        raise problem

    def _find_next_look(self, found: _Found) -> int | None:
        now_us, times = self._clock.now_us(), [found.answer.validity_change_us]
        for one, _ in found.shown:
            times.append(expiry_us(one, found.record_of(one).policy.retention))
            times.append(one.next_validity_us(now_us))  # of another server's memory the answer has no time
        if found.asked and found.answer.degraded:
            times.append(now_us + DEGRADED_US)
        return min([one for one in times if one is not None], default=None)

    async def _still_holds(self, block: Block, standing: StandingAnswer, records: Mapping[str, MemoryRecord]) -> bool:
        """Whether all that the text was made of is there, current, and unchanged since. records: by path, of the
        memories that may be asked."""
        state, now_us = block.state or StandingState(), self._clock.now_us()
        seen = {str(one.memory): one.revision for one in state.asked} or {"": state.revision}
        of_memory: dict[str, list[str]] = {}
        for id_, path in zip(standing.sources, standing.memories or [""] * len(standing.sources), strict=True):
            of_memory.setdefault(path, []).append(id_)
        for path, ids in of_memory.items():
            if path not in records:
                return False
            there = await self._journal.get_fragments(records[path].uid, ids)
            current = [
                one
                for one in drop_expired(there, records[path], now_us)
                if one.forget_time_us is None
                and one.status_at(now_us) is TruthStatus.CURRENT
                and one.version <= seen.get(path, -1)
            ]
            if len(current) < len(ids):
                return False
        return True

    async def _write(
        self, actor: Actor, block: Block, standing: StandingAnswer, found: _Found
    ) -> tuple[BlockContent, int]:
        """With an LLM its answer, else what was found; and the revision at which it holds. Raises ModelError."""
        held = found.revision
        if self._insights is None or not found.shown:
            return _with_digest(self._show_found(block, standing, found), found.digest), held
        tokens = block.content.max_tokens or TOKENS
        account = account_of(actor.working.record)
        question, shown = standing.question, [line for _, line in found.shown]
        try:
            said = await self._insights.answer(question.text, question.instructions, shown, tokens, account)
        except ModelRefused:
            await _record_cost(actor, account)
            raise
        if await _record_cost(actor, account) == held + 1:
            held += 1  # the event changes no fragment: the question need not be recalled for it
        lines: list[str] = []
        citations: list[tuple[str, ...]] = []
        for text, places in said:
            line = " ".join(text.split("\n"))
            if estimated_tokens("\n".join([*lines, line])) <= tokens:
                lines.append(line)
                citations.append(tuple(found.shown[place][0].id for place in places))
        answer = _make_answer(standing, found, citations)
        answer = replace(answer, digest=found.digest, model=self._model)
        return replace(block.content, text="\n".join(lines), standing=answer), held

    def _show_found(self, block: Block, standing: StandingAnswer, found: _Found) -> BlockContent:
        """The lines of what was found, as many as fit."""
        tokens = block.content.max_tokens or TOKENS
        shown = write_lines(standing.question.text, [one for one, _ in found.shown], tokens)
        answer = _make_answer(standing, found, [(one.id,) for one, _ in shown])
        return replace(block.content, text="\n".join(line for _, line in shown), standing=answer)


async def find_own_due(
    store: BlockStore, tended: Callable[[str], bool], now_us: int, most: int = DUE_MAX
) -> list[tuple[str, str]]:
    """Due blocks of memories that are `tended` here: all, or at least `most`. Those of other servers hide none."""
    limit = most
    while True:
        due = (await store.find_due(now_us, limit)).each
        own = [(uid, name) for uid, name in due if tended(uid)]
        if len(own) >= most or len(due) < limit:
            return own
        limit *= 2


async def _record_cost(actor: Actor, account: Account) -> int:
    """Enter what the LLM cost in the history, also if its answer is not stored; the revision afterwards."""
    return await actor.run(lambda _: Decision().with_cost(account, Purpose.ANSWER) if account.requests else None)


def _make_answer(standing: StandingAnswer, found: _Found, citations: Sequence[tuple[str, ...]]) -> StandingAnswer:
    sources = tuple([one.id for one, _ in found.shown])
    memories = tuple([found.paths[id_] for id_ in sources]) if standing.question.scopes else ()
    return replace(standing, citations=tuple(citations), sources=sources, memories=memories, digest=b"", model="")


def still_holds(content: BlockContent, there: Sequence[Fragment], now_us: int) -> bool:
    """Whether all that an earlier version was made of is as it was. there: of its sources those that have not
    expired."""
    standing = content.standing
    if standing is None or not standing.digest:
        return False
    current = [one for one in there if one.forget_time_us is None and one.status_at(now_us) is TruthStatus.CURRENT]
    shown = write_shown(standing.question.text, current, standing.model, content.max_tokens)
    return digest_answer(standing.question, standing.model, content.max_tokens, shown, {}) == standing.digest


def write_shown(question: str, found: Sequence[Fragment], model: str, most: int) -> list[tuple[Fragment, str]]:
    """The lines that a text of at most so many tokens is made of, for the LLM if there is one."""
    return write_lines(question, found, SHOWN_TOKENS if model else most or TOKENS, MEMORY_TOKENS if model else 0)


def digest_answer(
    question: StandingQuestion, model: str, most: int, shown: Sequence[tuple[Fragment, str]], paths: Mapping[str, str]
) -> bytes:
    """Differs if what a text is made of does. paths: the memory of each fragment, if it is not the block's own."""
    texts = [question.text, question.instructions, model, str(most)]
    for fragment, line in shown:
        path = paths.get(fragment.id)
        texts += (path, fragment.id, line) if path else (fragment.id, line)
    digest = blake2b(digest_size=_DIGEST_BYTES)
    for text in texts:
        encoded = text.encode()
        digest.update(len(encoded).to_bytes(8))
        digest.update(encoded)
    return digest.digest()


def _with_digest(content: BlockContent, digest: bytes) -> BlockContent:
    assert content.standing is not None
    return replace(content, standing=replace(content.standing, digest=digest))
