"""Runs in DB-GPT's environment: runs its tiers on the cases of the input; prints their content after each step.

The case gives every random number: DB-GPT's classes run unchanged, except for `random.random` of their module.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from concurrent.futures import Executor, Future
from types import SimpleNamespace
from typing import Any

from dbgpt.agent import AgentMemoryFragment
from dbgpt.agent.core.memory import short_term
from dbgpt.agent.core.memory.base import ImportanceScorer, SensoryMemory, ShortTermMemory, WriteOperation
from dbgpt.agent.core.memory.short_term import EnhancedShortTermMemory


class Inline(Executor):
    """Runs the work in the calling thread."""

    def submit(self, work: Callable[..., Any], /, *given: Any, **named: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(work(*given, **named))
        return done


class Draws:
    """Replaces a random number by the draw of the pair that is being compared."""

    def __init__(self, case: dict[str, Any]) -> None:
        self._case = case
        self._words: dict[int, str] = {}
        self._vectors: list[list[float]] = []
        self._pair = ""

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        vectors = [list(self._case["vectors"][text]) for text in texts]
        self._vectors += vectors  # their ids stay theirs
        self._words |= {id(vector): text for vector, text in zip(vectors, texts, strict=True)}
        return vectors

    def cosine(self, one: list[float], other: list[float]) -> float:
        self._pair = f"{self._words[id(one)]},{self._words[id(other)]}"
        return _cosine(one, other)

    def random(self) -> float:
        return self._case["draws"][self._pair]


_cosine = short_term.cosine_similarity


class Scores(ImportanceScorer[AgentMemoryFragment]):
    """The scores of the case."""

    def __init__(self, scores: dict[str, float]) -> None:
        self._scores = scores

    async def score_importance(self, memory_fragment: AgentMemoryFragment, llm_client: object = None) -> float:
        return self._scores[memory_fragment.raw_observation]


def memory_of(case: dict[str, Any], draws: Draws) -> Any:
    match case["kind"]:
        case "sensory":
            return SensoryMemory(buffer_size=case["capacity"])
        case "short_term":
            return ShortTermMemory(buffer_size=case["capacity"])
        case _:
            return EnhancedShortTermMemory(
                draws,
                Inline(),
                buffer_size=case["capacity"],
                enhance_similarity_threshold=case["similarity_threshold"],
                enhance_threshold=case["enhance_threshold"],
            )


def held(memory: Any) -> list[dict[str, Any]]:
    enhanced = isinstance(memory, EnhancedShortTermMemory)
    return [
        {
            "words": fragment.raw_observation,
            "count": memory.enhance_cnt[place] if enhanced else 0,
            "enhancers": [one.raw_observation for one in memory.enhance_memories[place]] if enhanced else [],
        }
        for place, fragment in enumerate(memory._fragments)
    ]


async def run(case: dict[str, Any]) -> list[dict[str, Any]]:
    """After each step: the held fragments in order, and those that left."""
    draws = Draws(case)
    short_term.cosine_similarity = draws.cosine
    short_term.random = SimpleNamespace(random=draws.random)
    memory = memory_of(case, draws)
    memory.initialize("joy", importance_scorer=Scores(case["scores"]), real_memory_fragment_class=AgentMemoryFragment)
    states = []
    for words, recollected in case["steps"]:
        fragment = AgentMemoryFragment(words, importance=case["scores"][words])
        op = WriteOperation.RETRIEVAL if recollected else WriteOperation.ADD
        left = await memory.write(fragment, op=op)
        gone = left.discarded_memory_fragments if left else []
        states.append({"held": held(memory), "left": [[one.raw_observation, one.importance] for one in gone]})
    return states


async def main() -> None:
    print(json.dumps([await run(case) for case in json.load(sys.stdin)]))


if __name__ == "__main__":
    asyncio.run(main())
