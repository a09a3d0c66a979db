"""The operation "reindex": the index made anew from the journal's vectors.

With `embed` every vector is to be computed anew under the server's model; who can do that sets `embed`.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from memstream_server.engine.errors import CapabilityMissing
from memstream_server.engine.operations import AnswerOf, OperationRunner, Progress, Work
from memstream_server.ports.operations import Operation

if TYPE_CHECKING:
    from memstream_server.engine.indexing import Indexer

TYPE = "reindex"
UNIT = "fragments"


class Reindexing:
    """Starts and does it. Recalls go on; what they lack meanwhile they say in `degraded`."""

    def __init__(self, runner: OperationRunner, indexer: Indexer) -> None:
        self._runner = runner
        self._indexer = indexer
        self.embed: Work | None = None
        """How everything is embedded anew, where that can be done."""
        runner.register(TYPE, UNIT, self._work)

    async def start(self, embed: bool, answer: AnswerOf = None) -> Operation:
        """Raises CapabilityMissing when `embed` is asked for and not to be had."""
        if embed:
            self._embedding()
        return await self._runner.start(TYPE, "", "", json.dumps({"embed": embed}), answer)

    async def _work(self, operation: Operation, progress: Progress) -> None:
        if json.loads(operation.payload)["embed"]:
            await self._embedding()(operation, progress)
        else:
            await self._indexer.rebuild(progress.at)

    def _embedding(self) -> Work:
        if self.embed is None:
            text = "this server cannot embed everything anew; without `embed` it rebuilds the index from stored vectors"
            raise CapabilityMissing(text, capability="OPERATIONS")
        return self.embed
