"""Receipts of recalls: a replay ranks the same to the last bit, or names what is gone."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from memstream_server.core.policy import with_value
from memstream_server.core.values import MemoryKind
from memstream_server.engine.engine import Engine
from memstream_server.engine.recall.recall_receipts import Replay
from memstream_server.engine.requests import NewMemory, Query, RecallAnswer
from memstream_server.engine.runtime.clock import Clock
from tests.engine.assembled import NAMESPACE, assembled, check, hasty
from tests.engine.memory import SettableClock
from tests.engine.test_past import POLICIES, Walk, plain

__all__ = ["hasty"]
pytestmark = pytest.mark.usefixtures("hasty")

JOY = (NAMESPACE, "joy")
STEPS = 30
QUERIES = {
    b"1": Query(text="where did Bob move with the blue bike", receipt=b"1"),
    b"2": Query(text="Ann likes coffee on Monday?", receipt=b"2", limit=3, near_misses=5, alpha=0.5),
    b"3": Query(text="garden 7 in Rome last week", receipt=b"3", token_budget=40, fold=False),
}
KINDS = POLICIES | {"dbgpt": with_value(POLICIES["merging"], "recall.limit", 10)}


async def replay(engine: Engine, receipt: str) -> Replay:
    return await engine.recall_receipts.replay(*JOY, receipt, QUERIES.__getitem__)


def shown(answer: RecallAnswer) -> object:
    """All of an answer that the memory, the query and the policy determine."""
    recollections = [
        (plain([one.fragment]), one.scored.parts, one.folded, one.truncated, one.status, one.chain)
        for one in answer.recollections
    ]
    return (
        answer.revision,
        recollections,
        answer.working_ids,
        answer.considered,
        answer.weak,
        answer.interpreted,
        [(one.scored.id, one.stage) for one in answer.near_misses],
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [1, 2])
async def test_a_replay_ranks_the_same_to_the_last_bit(tmp_path: Path, kind: str, seed: int) -> None:
    clock = SettableClock()
    policy = with_value(KINDS[kind], "history.receipts", 1_000)
    async with assembled(tmp_path, clock=Clock(now_us=clock.now_us)) as parts:
        engine = parts.engine
        await engine.memories.create(NewMemory(NAMESPACE, "joy", MemoryKind.HYBRID, policy))
        walked = Walk(engine, clock, random.Random(seed))
        answers: dict[str, RecallAnswer] = {}
        for _ in range(STEPS):
            await walked.step()
            query = walked.random.choice(list(QUERIES.values()))
            answer = await engine.recall(*JOY, query)
            answers[answer.receipt_id] = answer
            clock.offset_us += walked.random.choice([0, 3_600_000_000])
        for receipt, answer in answers.items():
            replayed = await replay(engine, receipt)
            assert (replayed.same, replayed.differences) == (True, ()), receipt
            assert replayed.answer is not None
            assert shown(replayed.answer) == shown(answer)
        await check(engine, "joy")
