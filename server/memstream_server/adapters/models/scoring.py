"""Importance by an LLM: several texts a question, each rated 1 to 10 (Generative Agents, arXiv 2304.03442, 4.1).

Rule 1. A refused batch is halved until the refused texts stand alone; when nothing of a call is taken, a harmless
text is tried before the texts are blamed.
Rule 2. Scores are kept by text, so that a call that failed in part and comes again asks only for the rest: a memory
that waits for its scorer gets on even where the budget lets through less than one call needs.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from string import Template

from memstream_server.adapters.models import answers
from memstream_server.adapters.models.openai_chat import ChatModel, Question, Role, numbered
from memstream_server.adapters.models.openai_errors import RefusedError
from memstream_server.core.rendering import clip_for_index
from memstream_server.ports.models import Account, ModelRefused, ModelUnavailable

KEPT_MAX = 16_384
"""Scores kept: some 3 MB."""
HARMLESS = "The weather was fine."
"""What no model refuses to rate."""


class ChatScorer:
    """ports.models.Scorer. Long texts are clipped as they are for the lexical index."""

    def __init__(
        self, chat: ChatModel, guidance: Template, batch_texts: int = 20, batch_characters: int = 12_000
    ) -> None:
        self._chat = chat
        self._guidance = guidance.substitute()
        self._batch_texts = batch_texts
        self._batch_characters = batch_characters
        self._kept: OrderedDict[bytes, float] = OrderedDict()

    async def score(self, texts: Sequence[str], account: Account | None = None) -> list[float]:
        """n/10 of each text. Raises ModelUnavailable, or ModelRefused with the places that are refused for good."""
        found = {place: score for place, text in enumerate(texts) if (score := self._recalled(text)) is not None}
        clipped = [clip_for_index(text) for text in texts]
        batches = self._batches(clipped, [place for place in range(len(texts)) if place not in found])
        # All are waited for: what the others bring is kept, though one fails.
        done = await asyncio.gather(
            *(self._fill(found, clipped, places, account) for places in batches), return_exceptions=True
        )
        for place, score in found.items():
            self._keep(texts[place], score)
        for failure in done:
            if isinstance(failure, BaseException):
                raise failure
        refused = [place for place in range(len(texts)) if place not in found]
        if refused and not found:
            await self._harmless(account)
        if refused:
            raise ModelRefused(f"{len(refused)} of {len(texts)} texts are refused", refused)
        return [found[place] for place in range(len(texts))]

    def _batches(self, texts: Sequence[str], places: Sequence[int]) -> Iterator[list[int]]:
        batch: list[int] = []
        room = self._batch_characters
        for place in places:
            if batch and (len(batch) == self._batch_texts or len(texts[place]) > room):
                yield batch
                batch, room = [], self._batch_characters
            batch.append(place)
            room -= len(texts[place])
        if batch:
            yield batch

    async def _fill(
        self, found: dict[int, float], texts: Sequence[str], places: list[int], account: Account | None
    ) -> None:
        """Write the scores of `places` that are not refused."""
        try:
            scores = await self._ask([texts[place] for place in places], account)
        except RefusedError:
            middle = len(places) // 2
            for half in (places[:middle], places[middle:]) if middle else ():
                await self._fill(found, texts, half, account)
            return
        found.update(zip(places, scores, strict=True))

    async def _ask(self, texts: list[str], account: Account | None) -> list[float]:
        question = Question(Role.SCORER, self._guidance, {"texts": numbered(texts)}, answers.SCORES)
        return await self._chat.ask(question, lambda answer: answers.scores(answer, len(texts)), account)

    async def _harmless(self, account: Account | None) -> None:
        try:
            await self._ask([HARMLESS], account)
        except RefusedError as error:
            raise ModelUnavailable(f"the endpoint refuses any text: {error}") from error

    def _recalled(self, text: str) -> float | None:
        return self._kept.get(_digest(text))

    def _keep(self, text: str, score: float) -> None:
        self._kept[_digest(text)] = score
        if len(self._kept) > KEPT_MAX:
            self._kept.popitem(last=False)


def _digest(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=16).digest()
