"""Importance by an LLM: several texts per question, each rated 1 to 10 (Generative Agents, arXiv 2304.03442, 4.1).

Rule 1. A refused batch is split in halves until the refused texts are isolated. If all texts of a call are refused,
the scorer sends a harmless text before it refuses them.
Rule 2. The scores of a partly failed call are cached until a retry succeeds, so that a memory that waits for its scorer
makes progress even if the budget is less than one call needs.
Rule 3. The cache is per memory, and holds no scores of a successful call: neither the score of a text nor the fact
that the model was called depends on the texts of others.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from string import Template

from memstream_server.adapters.models import reply_parsing
from memstream_server.adapters.models.openai_chat import HARMLESS, ChatModel, ModelQuestion, ModelRole, number_texts
from memstream_server.adapters.models.openai_errors import RefusedError
from memstream_server.core.rendering import clip_for_index
from memstream_server.ports.models import Account, ModelRefused, ModelUnavailable

KEPT_MAX = 1_024
"""Cached scores per memory."""
MEMORIES_MAX = 128
"""Memories with cached scores."""


class ChatScorer:
    """ports.models.Scorer. Long texts are clipped as for the lexical index."""

    def __init__(
        self, chat: ChatModel, guidance: Template, batch_texts: int = 20, batch_characters: int = 12_000
    ) -> None:
        self._chat = chat
        self._guidance = guidance.substitute()
        self._batch_texts = batch_texts
        self._batch_characters = batch_characters
        self._kept: OrderedDict[str, dict[bytes, float]] = OrderedDict()
        """By memory and text digest."""

    async def score(self, texts: Sequence[str], account: Account | None = None) -> list[float]:
        """n/10 for each text. Raises ModelUnavailable, or ModelRefused with the indices of the refused texts."""
        digests = [_text_digest(text) for text in texts]
        known = self._kept.get(account.memory, {}) if account is not None else {}
        found = {place: known[digest] for place, digest in enumerate(digests) if digest in known}
        clipped = [clip_for_index(text) for text in texts]
        batches = self._split_batches(clipped, [place for place in range(len(texts)) if place not in found])
        try:
            await self._fill_all(found, clipped, batches, account)
            refused = [place for place in range(len(texts)) if place not in found]
            if refused and not found:
                await self._ask_harmless(account)
            if refused:
                raise ModelRefused(f"{len(refused)} of {len(texts)} texts are refused", refused)
        except BaseException:
            self._keep_scores(account, {digests[place]: score for place, score in found.items()})
            raise
        self._drop_scores(account, digests)
        return [found[place] for place in range(len(texts))]

    def _split_batches(self, texts: Sequence[str], places: Sequence[int]) -> Iterator[list[int]]:
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

    async def _fill_all(
        self,
        found: dict[int, float],
        texts: Sequence[str],
        batches: Iterable[list[int]],
        account: Account | None,
    ) -> None:
        """Set the scores of all texts that are not refused; after a failure, those of the batches that succeeded."""
        done = await asyncio.gather(
            *(self._fill_batch(found, texts, places, account) for places in batches), return_exceptions=True
        )
        for failure in done:
            if isinstance(failure, BaseException):
                raise failure

    async def _fill_batch(
        self, found: dict[int, float], texts: Sequence[str], places: list[int], account: Account | None
    ) -> None:
        """Set the scores of those `places` that are not refused."""
        try:
            scores = await self._ask_scores([texts[place] for place in places], account)
        except RefusedError:
            middle = len(places) // 2
            for half in (places[:middle], places[middle:]) if middle else ():
                await self._fill_batch(found, texts, half, account)
            return
        found.update(zip(places, scores, strict=True))

    async def _ask_scores(self, texts: list[str], account: Account | None) -> list[float]:
        data = {"texts": number_texts(texts)}
        question = ModelQuestion(
            ModelRole.SCORER, self._guidance, data, reply_parsing.SCORES, harmless=texts == [HARMLESS]
        )
        return await self._chat.ask_model(
            question, lambda answer: reply_parsing.parse_scores(answer, len(texts)), account
        )

    async def _ask_harmless(self, account: Account | None) -> None:
        try:
            await self._ask_scores([HARMLESS], account)
        except RefusedError as error:
            self._chat.renegotiate_later()
            raise ModelUnavailable(f"the endpoint refuses any text: {error}", summary=error.summary) from error

    def _keep_scores(self, account: Account | None, scores: dict[bytes, float]) -> None:
        if account is None or not account.memory or not scores:
            return
        kept = self._kept.setdefault(account.memory, {})
        kept.update(scores)
        for digest in list(kept)[: max(0, len(kept) - KEPT_MAX)]:
            del kept[digest]
        if len(self._kept) > MEMORIES_MAX:
            self._kept.popitem(last=False)

    def _drop_scores(self, account: Account | None, digests: Iterable[bytes]) -> None:
        kept = self._kept.get(account.memory) if account is not None else None
        if account is None or kept is None:
            return
        for digest in digests:
            kept.pop(digest, None)
        if not kept:
            del self._kept[account.memory]


def _text_digest(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=16).digest()
