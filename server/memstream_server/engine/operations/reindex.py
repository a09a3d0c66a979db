"""The operation "reindex": the index made anew from the journal's vectors.

With `embed` everything is embedded anew under the next model (reembedding.py).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from memstream_server.engine.operations.runner import AnswerOf, OperationRunner, Progress
from memstream_server.ports.operations import Operation

if TYPE_CHECKING:
    from memstream_server.engine.background.indexer import Indexer
    from memstream_server.engine.operations.reembed import Reembedding

TYPE = "reindex"
UNIT = "fragments"


class Reindexing:
    """Starts and does it. Recalls go on; what they lack meanwhile they say in `degraded`."""

    def __init__(self, runner: OperationRunner, indexer: Indexer, reembedding: Reembedding) -> None:
        self._runner = runner
        self._indexer = indexer
        self._reembedding = reembedding
        runner.register(TYPE, UNIT, self._work, undoes=True)

    async def start(self, embed: bool, answer: AnswerOf = None) -> Operation:
        """Raises ModelMismatch when `embed` is asked for and there is no other model to go to."""
        payload = {"embed": embed, "model": await self._reembedding.target() if embed else ""}
        return await self._runner.start(TYPE, "", "", json.dumps(payload), answer)

    async def _work(self, operation: Operation, progress: Progress) -> None:
        if json.loads(operation.payload)["embed"]:
            await self._reembedding.work(operation, progress)
        else:
            await progress.still()
            await self._indexer.rebuild(progress.at)
