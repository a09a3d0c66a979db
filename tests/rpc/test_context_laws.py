"""What a filter, a right, validity or an erasure excludes is in no part of a context, in no later turn either."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, NamedTuple

import pytest
from google.protobuf.duration_pb2 import Duration
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memstream.v1 import context_service_pb2 as pb
from memstream.v1.fragment_pb2 import FragmentFilter
from memstream.v1.scope_pb2 import RecallScope
from memstream_server.core.context.position import unpack_position
from memstream_server.core.filters import Filter, Listing
from memstream_server.core.policy import Policy
from memstream_server.core.values import Fragment, MemoryKind, Role
from memstream_server.engine.background.standing_blocks import digest_answer, write_shown
from memstream_server.engine.blocks import BlockPut
from memstream_server.engine.context import Contexts
from memstream_server.engine.errors import EtagMismatch
from memstream_server.engine.lifecycle import FragmentChange
from memstream_server.engine.requests import AckLevel, NewMemory, NewObservation
from memstream_server.ports.blocks import (
    Block,
    BlockContent,
    BlockName,
    MemoryName,
    StandingAnswer,
    StandingQuestion,
    StandingState,
)
from memstream_server.ports.conversations import ConversationName, Message, Precondition
from memstream_server.ports.operations import OperationState
from memstream_server.rpc.access.caller import CALLER, Caller
from memstream_server.rpc.context import ContextService
from tests.engine.engine_parts import PartsEngine
from tests.rpc.conftest import LIMITS
from tests.support.seeds import rounds
from tests.support.waiting import until

MEMORIES = ("m0", "m1")
TALKS = "talks"
_numbers = count()
_SUBJECTS = ("kettle", "bicycle", "passport")
FACTS = len(_SUBJECTS)
FILTERS = {
    "all": FragmentFilter(),
    "ann": FragmentFilter(speakers=["Ann"]),
    "not ann": FragmentFilter(none_of=[FragmentFilter(speakers=["Ann"])]),
}


@dataclass
class Fact:
    """A fragment whose text has a word that no other text has, and what the history has made of it."""

    fragment: Fragment
    memory: str
    word: str
    is_gone: bool = False
    """Erased or expired,"""
    is_forgotten: bool = False
    is_invalid: bool = False
    is_superseded: bool = False
    is_shown: bool = False
    """In the last turn."""

    def may_show(self, turn: Turn) -> bool:
        """Whether the caller of the turn may read it."""
        is_passed = turn.filter == "all" or (turn.filter == "ann") == (self.fragment.speaker == "Ann")
        return not (self.is_gone or self.is_forgotten or self.is_invalid) and self.memory in turn.rights and is_passed


class Turn(NamedTuple):
    """A step of a history: changes, and a turn after them or, if `at_once`, at the same time."""

    acts: list[tuple[str, int]]
    """(change, place of the fact)."""
    at_once: bool
    rights: frozenset[str]
    filter: str
    asked: frozenset[int]
    recorded: bool
    is_cold: bool
    """Whether no fragment is in RAM."""


WHOLE = Turn([], False, frozenset(MEMORIES), "all", frozenset(range(FACTS)), True, False)
"""A turn in which nothing is excluded but by what has changed before it."""
_BOTH: list[tuple[str, ...]] = [MEMORIES]
_SOME: list[tuple[str, ...]] = [*[MEMORIES] * 4, ("m0",), ("m1",), ()]
_FILTERED = ["all"] * 4 + ["ann", "not ann"]
LAWS: dict[str, tuple[list[str], list[tuple[str, ...]], list[str]]] = {
    "filter": (["supersede"], _BOTH, ["all", "ann", "not ann"]),
    "right": (["supersede", "delete"], [MEMORIES, ("m0",), ("m1",), ()], ["all"]),
    "validity": (["end", "postpone", "renew", "expire", "supersede"], _SOME, _FILTERED),
    "erasure": (["erase", "forget", "restore", "delete", "supersede"], _SOME, _FILTERED),
}
"""Of each law: changes, rights and filters that are drawn, those that stand there several times more often."""


def _draw_turns(law: str, changing: set[int]) -> st.SearchStrategy[list[Turn]]:
    """Histories in which these facts change: few, so that one fact meets several changes."""
    acts, rights, filters = LAWS[law]
    return st.lists(
        st.builds(
            Turn,
            acts=st.lists(st.tuples(st.sampled_from(acts), st.sampled_from(sorted(changing))), min_size=1, max_size=3),
            at_once=st.booleans(),
            rights=st.sampled_from(rights).map(frozenset),
            filter=st.sampled_from(filters),
            asked=st.sampled_from([WHOLE.asked, WHOLE.asked, frozenset([0]), frozenset([1, 2])]),
            recorded=st.booleans(),
            is_cold=st.booleans(),
        ),
        min_size=1,
        max_size=4,
    )


_facts = st.sets(st.integers(0, 2 * FACTS - 1), min_size=1, max_size=2)


@contextmanager
def called_with(rights: frozenset[str]) -> Iterator[None]:
    """A caller that may do everything in conversations and in memories with these labels."""

    def may(_verb: object, namespace: str, labels: Any) -> bool:
        return namespace == TALKS or labels is None or any(name in rights for _, name in labels)

    async def again() -> None:
        raise AssertionError("a unary call asks once")

    token = CALLER.set(Caller("key:joy", may, again))
    try:
        yield
    finally:
        CALLER.reset(token)


class Call:
    """The call of a request, as far as a context needs one."""

    def time_remaining(self) -> None:
        """No deadline."""


@dataclass
class History:
    """Two memories with a block each, a conversation, and its last turn."""

    engine: PartsEngine
    namespace: str = field(default_factory=lambda: f"laws-{next(_numbers)}")
    facts: list[Fact] = field(default_factory=list)
    blocks: set[str] = field(default_factory=set)
    """The memories that have one."""
    position: bytes = b""

    @property
    def talk(self) -> ConversationName:
        return ConversationName(TALKS, self.namespace)

    async def begin(self) -> None:
        policy = replace(Policy(), conflicts=replace(Policy().conflicts, suspect=False))
        for name in MEMORIES:
            new = NewMemory(self.namespace, name, MemoryKind.LONG_TERM, policy, labels=(("name", name),))
            await self.engine.memories.create(new)
            said = [
                NewObservation(
                    f"the {subject} of {name} has the mark {name}-{subject}-secret",
                    speaker="Bob" if place % 2 else "Ann",
                    role=Role.ASSISTANT if place % 2 else Role.USER,  # a reply is found with what it answers
                    session=f"s{place // 2}",
                    observe_time_us=place * 86_400_000_000,
                )
                for place, subject in enumerate(_SUBJECTS)
            ]
            await self.engine.observe_batch(self.namespace, name, "", 1, said, AckLevel.STORED)
            listed, *_ = await self.engine.fragments.list_page(self.namespace, name, Listing(), -1, 99)
            self.facts += [Fact(one, name, one.content.split()[-1]) for one in sorted(listed, key=lambda one: one.id)]
            await self.engine.blocks.put(self._block(name), BlockPut(f"my sign is {name}-block-secret"), None)
            self.blocks.add(name)

    def _block(self, name: str) -> BlockName:
        return BlockName(MemoryName(self.namespace, name), "persona")

    async def change(self, acts: list[tuple[str, int]]) -> None:
        """Change fragments, and delete blocks."""
        for act, which in acts:
            await self._act(act, which)

    async def _act(self, act: str, which: int) -> None:
        fact = self.facts[which]
        if fact.is_gone:
            return
        fragments, where, id = self.engine.fragments, (self.namespace, fact.memory), fact.fragment.id
        now_us = time.time_ns() // 1000
        changes: dict[str, dict[str, Any]] = {
            "end": {"valid_until_us": now_us - 1, "unbounded": frozenset(["valid_from_us"])},
            "postpone": {"valid_from_us": now_us + 10**12, "unbounded": frozenset(["valid_until_us"])},
            "expire": {"expire_time_us": now_us - 1},
            "renew": {"unbounded": frozenset(["valid_from_us", "valid_until_us"])},
        }
        if act == "erase":
            operation = await self.engine.erasing.start(*where, [id])
            assert (await self.engine.operations.wait_for_end(operation.id)).state is OperationState.SUCCEEDED
            fact.is_gone = True
        elif act == "delete":
            self.blocks.discard(fact.memory)
            await self.engine.blocks.delete(self._block(fact.memory), None)
        elif act == "restore" and fact.is_forgotten:
            await fragments.restore(*where, [id])
            fact.is_forgotten = False
        elif act == "forget":
            await fragments.forget(*where, [id])
            fact.is_forgotten = True
        elif act == "supersede" and which % FACTS < FACTS - 1:
            later = self.facts[which + 1]
            if not (fact.is_forgotten or later.is_forgotten or later.is_gone):
                await fragments.supersede(*where, [id], later.fragment.id)
                fact.is_superseded = True
        elif act in changes and not fact.is_forgotten:
            await fragments.update(*where, FragmentChange(id, **changes[act]))
            fact.is_gone = act == "expire"
            fact.is_invalid = act != "renew"

    async def take(self, turn: Turn) -> None:
        """Make the changes of a turn and compare its context with what may be in it."""
        if turn.at_once:
            _, answer = await asyncio.gather(self.change(turn.acts), self.ask(turn))
        else:
            await self.change(turn.acts)
            answer = await self.ask(turn)
        self.check(turn, answer)

    async def ask(self, turn: Turn) -> pb.ContextResponse:
        """The context of a turn."""
        if turn.is_cold:
            await self.empty_caches()
        subjects = [_SUBJECTS[which] for which in sorted(turn.asked)]
        question = f"Which mark has the {' and the '.join(subjects)}?"
        request = pb.ContextRequest(
            scopes=[RecallScope(memory=f"{self.namespace}/{name}") for name in MEMORIES],
            blocks=[str(self._block(name)) for name in MEMORIES],
            partial=True,
            question=question,
            conversation=str(self.talk),
            budget=20_000,
            limit=2 * FACTS,
            filter=FILTERS[turn.filter],
            reinforce=False,
            after=self.position,
            timeout=Duration(seconds=600),  # what is late would be missing
        )
        service = ContextService(self.engine, Contexts(self.engine, self.engine.clock), LIMITS, None)
        with called_with(turn.rights):
            answer = await service.context(request, Call())  # type: ignore[arg-type]  # see Call
        self.position = answer.position
        if turn.recorded:
            said = [Message(role="user", content=question), Message(role="assistant", content="I see.")]
            store = self.engine.storage.conversations
            await store.append_messages(self.talk, said, Precondition(), time.time_ns() // 1000)
        return answer

    async def empty_caches(self) -> None:
        """Have the next turn read all fragments from the journal."""
        for name in MEMORIES:
            async with self.engine.actors.use(self.namespace, name) as actor:
                for fact in self.facts:
                    actor.working.fragment_cache.remove(fact.fragment.id)

    def check(self, turn: Turn, answer: pb.ContextResponse) -> None:
        """Compare a turn with what may be in it. Of what changed at the same time nothing is known."""
        text = "".join(part.text for part in answer.parts)
        named = {id for part in answer.parts for id in part.fragment_ids}
        named |= {one.fragment_id for one in answer.citations}
        named |= {id for one in answer.corrections for id in (one.fragment_id, one.superseded_by)}
        changing = {which for _, which in turn.acts} if turn.at_once else set()
        assert not answer.degraded
        for number, fact in enumerate(self.facts):
            is_asked = number % FACTS in turn.asked
            was_shown, fact.is_shown = fact.is_shown, fact.word in text
            if number in changing:
                continue
            if not fact.may_show(turn):
                assert not fact.is_shown
                assert fact.fragment.id not in named
            elif was_shown or (is_asked and not fact.is_superseded):
                assert fact.is_shown, "what is not excluded is there"
        for name in MEMORIES:
            is_shown = f"{name}-block-secret" in text
            if name not in turn.rights or not turn.at_once:
                assert is_shown == (name in turn.rights and name in self.blocks)


@pytest.mark.drawn
@pytest.mark.parametrize("law", LAWS)
@settings(max_examples=rounds(40, 12), deadline=None, suppress_health_check=list(HealthCheck))
@given(drawn=st.data())
async def test_no_turn_has_what_is_excluded(real: PartsEngine, law: str, drawn: st.DataObject) -> None:
    turns = drawn.draw(_facts.flatmap(lambda changing: _draw_turns(law, changing)))
    history = History(real)
    await history.begin()
    await history.take(WHOLE)
    for turn in turns:
        await history.take(turn)
        await history.take(WHOLE)


# ---- summaries
GIST_ACTS = ["write", "write", "erase", "forget", "restore", "end", "renew", "expire", "edit", "delete"]
_NOTHING = StandingQuestion("what?", filter=Filter(speakers=("nobody",)))
"""The server answers it with an empty text."""


@dataclass
class Told(History):
    """A conversation with a summary that is made of facts of the first memory, written by the test."""

    made_of: dict[int, frozenset[int]] = field(default_factory=dict)
    """Facts by version; nothing is known of one that an erasure or the server has made."""
    edited: set[int] = field(default_factory=set)
    erased: set[int] = field(default_factory=set)

    @property
    def gist(self) -> BlockName:
        return BlockName(MemoryName(self.namespace, "m0"), "gist")

    async def put_question(self) -> None:
        """Of a block whose state says that it is never due."""
        await self.engine.blocks.put(self.gist, BlockPut("", standing=_NOTHING), None)

    async def write(self, chosen: frozenset[int]) -> None:
        """A version that is made of what of these facts is there."""
        here = [number for number in sorted(chosen) if self._holds(number)]
        ids = [self.facts[number].fragment.id for number in here]
        there = await self.engine.fragments.read_many(self.namespace, "m0", ids)
        lines = write_shown(_NOTHING.text, there, "", 0)
        answer = StandingAnswer(
            _NOTHING,
            tuple((one.id,) for one, _ in lines),
            tuple(one.id for one, _ in lines),
            digest=digest_answer(_NOTHING, "", 0, lines, {}),
        )
        content = BlockContent("\n".join(line for _, line in lines), standing=answer)
        never = StandingState(2**40, 2**60)
        uid = (await self.engine.memories.get(self.namespace, "m0")).uid
        contents = {one.id: one.content for one in there}

        async def renew() -> Block | None:
            try:
                old = await self.engine.blocks.get(self.gist)
                return await self.engine.blocks.renew(self.gist, old, content, {uid: contents}, never)
            except EtagMismatch:  # the server has written an empty answer after an erasure
                return None

        written = await until(renew)
        self.made_of[written.version] = frozenset(here)

    def _holds(self, number: int) -> bool:
        fact = self.facts[number]
        return not (fact.is_gone or fact.is_forgotten or fact.is_invalid or number in self.edited)

    async def make(self, act: str, which: int, chosen: frozenset[int]) -> None:
        """A change of a fact or of the block."""
        if act == "write":
            await self.write(chosen)
        elif act == "delete":
            await self.engine.blocks.delete(self.gist, None)
            await self.put_question()
            self.made_of.clear()
        elif act == "edit":
            if self._holds(which):
                change = FragmentChange(self.facts[which].fragment.id, content="it is green")
                await self.engine.fragments.update(self.namespace, "m0", change)
                self.edited.add(which)
        else:
            await self._act(act, which)
            self.erased |= {which} if act == "erase" else set()

    async def say(self, number: int) -> None:
        """A turn of about 70 tokens."""
        said = [Message(role="user", content=_ask(number)), Message(role="assistant", content="I see. " * 18)]
        store = self.engine.storage.conversations
        await store.append_messages(self.talk, said, Precondition(), time.time_ns() // 1000)

    async def tell(self, number: int, may_read: bool) -> None:
        """Ask for a turn, compare what it has of the facts, and record it."""
        request = pb.ContextRequest(
            question=_ask(number),
            conversation=str(self.talk),
            summary=str(self.gist),
            partial=True,
            budget=2_000,
            tail_tokens=pb.TokenBounds(maximum=300),
            after=self.position,
            timeout=Duration(seconds=600),
        )
        service = ContextService(self.engine, Contexts(self.engine, self.engine.clock), LIMITS, None)
        present = {0, (await self.engine.blocks.get(self.gist)).version}
        with called_with(frozenset(MEMORIES if may_read else MEMORIES[1:])):
            answer = await service.context(request, Call())  # type: ignore[arg-type]  # see Call
        present.add((await self.engine.blocks.get(self.gist)).version)
        assert not answer.degraded
        last, now = unpack_position(self.position), unpack_position(answer.position)
        assert now is not None
        text, made = "".join(part.text for part in answer.parts), self.made_of.get(now.summary, frozenset())
        for place, fact in enumerate(self.facts[:FACTS]):
            if fact.word in text:
                assert may_read
                assert place in made - self.erased
        assert now.summary in present or all(map(self._holds, made)), "an earlier version holds"
        is_cut = any(one.kind == pb.CONTEXT_PART_KIND_MESSAGE for one in answer.left_out)
        if last is not None and may_read and not is_cut and last.summary in self.made_of:
            holds = all(map(self._holds, self.made_of[last.summary]))
            assert now.summary == last.summary or not holds, "it changes at a cut"
        self.position = answer.position
        await self.say(number)


def _ask(number: int) -> str:
    return f"question {number} {'of many words ' * 8}"


@pytest.mark.drawn
@settings(max_examples=rounds(40, 12), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(
        st.tuples(
            st.sampled_from(GIST_ACTS),
            st.integers(0, FACTS - 1),
            st.frozensets(st.integers(0, FACTS - 1), min_size=1),
            st.sampled_from([True, True, True, False]),
        ),
        min_size=2,
        max_size=7,
    )
)
async def test_no_summary_has_what_is_excluded(
    real: PartsEngine, drawn: list[tuple[str, int, frozenset[int], bool]]
) -> None:
    told = Told(real)
    await told.begin()
    await told.put_question()
    for number in range(6):
        await told.say(number)
    await told.write(WHOLE.asked)
    await told.tell(6, may_read=True)
    first = unpack_position(told.position)
    assert first is not None
    assert first.summary in told.made_of, "the tail is cut, and the summary is there"
    for number, (act, which, chosen, may_read) in enumerate(drawn):
        await told.make(act, which, chosen)
        await told.tell(7 + number, may_read)
