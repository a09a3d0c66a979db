"""Runs in DB-GPT's environment: reproduces each defect of its memories; prints JSON by name."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from typing import Any

from dbgpt.agent import AgentMemoryFragment, EnhancedShortTermMemory, HybridMemory, LongTermMemory, SensoryMemory
from dbgpt.agent.core.memory.base import InsightExtractor, InsightMemoryFragment, ShortTermMemory
from dbgpt.agent.core.memory.llm import LLMImportanceScorer
from dbgpt.core import Chunk

MADE = datetime(2020, 5, 8)
Said = AgentMemoryFragment


class Store:
    """A vector store that returns copies of everything, as a remote one does."""

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []
        self.filters: list[Any] = []

    def load_document_with_limit(self, chunks: list[Chunk]) -> list[str]:
        self.chunks += chunks
        return [str(len(self.chunks))]

    def similar_search_with_scores(self, query: str, topk: int, score_threshold: float, filters: Any) -> list[Chunk]:
        self.filters.append(filters)
        return [Chunk(content=one.content, metadata=dict(one.metadata), score=0.9) for one in self.chunks]


class Same:
    """Everything has the same vector."""

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [[1.0, 0.0] for _ in texts]


class NoInsights(InsightExtractor[AgentMemoryFragment]):
    async def extract_insights(self, memory_fragment: Said, llm_client: object = None) -> InsightMemoryFragment[Said]:
        return InsightMemoryFragment(memory_fragment, [])


class Watching(NoInsights):
    """Notes whether the memory's lock is held while the model works."""

    def __init__(self) -> None:
        self.memory: ShortTermMemory[Said] | None = None
        self.locked = False

    async def extract_insights(self, memory_fragment: Said, llm_client: object = None) -> InsightMemoryFragment[Said]:
        assert self.memory is not None
        self.locked = self.memory._lock.locked()
        return await super().extract_insights(memory_fragment, llm_client)


class Vague(LLMImportanceScorer[AgentMemoryFragment]):
    """A model that answers without a number."""

    async def call_llm(self, prompt: Any, llm_client: Any = None, **given: Any) -> str:
        return "quite important"


def long_term(store: Store | None = None, **given: Any) -> LongTermMemory[Said]:
    memory: LongTermMemory[Said] = LongTermMemory(ThreadPoolExecutor(1), store or Store(), now=MADE, **given)
    memory.initialize("joy", real_memory_fragment_class=AgentMemoryFragment)
    return memory


def hybrid(store: Store, capacity: int = 10, enough: int = 3, **given: Any) -> HybridMemory[Said]:
    enhanced: EnhancedShortTermMemory[Said] = EnhancedShortTermMemory(
        Same(), ThreadPoolExecutor(1), buffer_size=capacity, enhance_threshold=enough
    )
    enhanced.enhance_similarity_threshold = 0.0
    memory: HybridMemory[Said] = HybridMemory(MADE, SensoryMemory(), enhanced, long_term(store))
    memory.initialize("joy", real_memory_fragment_class=AgentMemoryFragment, **given)
    return memory


async def fifo_overflow() -> Any:
    memory: ShortTermMemory[Said] = ShortTermMemory(buffer_size=2)
    left = [await memory.write(Said(words)) for words in "12345"]
    return [one.raw_observation for each in left if each for one in each.discarded_memory_fragments]


async def shared_metadata() -> Any:
    store = Store()
    memory = long_term(store)
    for words, importance in (("tea", 0.1), ("rain", 0.9)):
        await memory.write_batch([Said(words, importance=importance)], MADE)
    await memory.read("tea")
    return {each.key: each.value for each in store.filters[0].filters if each.key == "importance"}


async def frozen_now() -> Any:
    store = Store()
    memory = hybrid(store, enough=1)
    for words in ("one", "two", "three", "four", "five", "six"):
        await memory.write(Said(words), now=MADE + timedelta(days=365))
    return {datetime.fromtimestamp(one.metadata["last_accessed_at"]).isoformat() for one in store.chunks}


async def access_times_lost() -> Any:
    store = Store()
    memory = long_term(store)
    await memory.write_batch([Said("tea", importance=0.5)], MADE)
    before = [dict(one.metadata) for one in store.chunks]
    memory.memory_retriever.now = MADE + timedelta(days=1)
    await memory.read("tea")
    return [dict(one.metadata) for one in store.chunks] == before


async def weights_ignored() -> Any:
    store = Store()
    memory = long_term(store)
    for words, importance in (("tea", 0.1), ("fire", 0.9)):
        await memory.write_batch([Said(words, importance=importance)], MADE)
    orders = [
        [one.raw_observation for one in await memory.read("tea", alpha=alpha, beta=beta, gamma=gamma)]
        for alpha, beta, gamma in ((1, 0, 0), (0, 1, 0), (0, 0, 1))
    ]
    return all(order == orders[0] for order in orders)


async def unparsable_score_deletes() -> Any:
    memory: SensoryMemory[Said] = SensoryMemory(buffer_size=0)
    memory.initialize("joy", importance_scorer=Vague())
    left = await memory.write(Said("the house is on fire"))
    return [[one.raw_observation for one in memory._fragments], left]


async def model_inside_the_lock() -> Any:
    memory: ShortTermMemory[Said] = ShortTermMemory(buffer_size=1)
    watching = Watching()
    watching.memory = memory
    memory.initialize("joy", insight_extractor=watching)
    for words in "12":
        await memory.write(Said(words))
    return watching.locked


async def reading_feeds_copies_back() -> Any:
    store = Store()
    memory = hybrid(store, enough=2)
    await memory._long_term_memory.write_batch([Said("tea", importance=0.5)], MADE)
    await memory.write(Said("rain"))
    for _ in range(12):
        await memory.read("tea")
    return [one.content for one in store.chunks]


async def empty_insights_crash() -> Any:
    memory = hybrid(Store(), enough=1, insight_extractor=NoInsights())
    try:
        for number in range(40):
            await memory.write(Said(f"{number}"))
    except IndexError as error:
        return str(error)
    return None


async def clear_keeps() -> Any:
    memory = hybrid(Store())
    await memory.write(Said("tea"))
    cleared = await memory.clear()
    return [cleared, [one.raw_observation for one in memory._short_term_memory.short_term_memories]]


async def nothing_reflects() -> Any:
    store = Store()
    memory = long_term(store, reflection_threshold=1.0)
    for number in range(4):
        await memory.write_batch([Said(f"{number}", importance=0.9)], MADE)
    return [memory.aggregate_importance > 1.0, memory.reflecting, len(store.chunks)]


async def same_words_are_one() -> Any:
    memory: EnhancedShortTermMemory[Said] = EnhancedShortTermMemory(Same(), ThreadPoolExecutor(1), buffer_size=2)
    memory.enhance_similarity_threshold = 0.0
    memory.enhance_threshold = 100
    anchor, first, second = Said("anchor", importance=9), Said("same", importance=1), Said("same", importance=5)
    memory._fragments, memory.short_embeddings = [anchor, first], [[1.0, 0.0], [1.0, 0.0]]
    memory.enhance_cnt, memory.enhance_memories = [2, 0], [[first, second], []]
    memory._fragments.append(second)
    memory.short_embeddings.append([1.0, 0.0])
    await memory.handle_overflow(memory._fragments)
    return memory.enhance_cnt[0]


DEFECTS: tuple[Callable[[], Awaitable[Any]], ...] = (
    fifo_overflow,
    shared_metadata,
    frozen_now,
    access_times_lost,
    weights_ignored,
    unparsable_score_deletes,
    model_inside_the_lock,
    reading_feeds_copies_back,
    empty_insights_crash,
    clear_keeps,
    nothing_reflects,
    same_words_are_one,
)
"""In the order of the design's list; the last is a finding of the comparison."""


async def main() -> None:
    shown = {defect.__name__: await defect() for defect in DEFECTS}
    print(json.dumps(shown, default=lambda value: sorted(value) if isinstance(value, set) else str(value)))


if __name__ == "__main__":
    asyncio.run(main())
