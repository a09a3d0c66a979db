"""The operation "reindex": rebuilds the index from the journal's vectors.

With `embed` everything is embedded with the next model instead (reembed.py), with `missing` what has no vector.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from memstream_server.engine.operations.runner import AnswerOf, OperationRunner, Progress
from memstream_server.ports.operations import Operation

if TYPE_CHECKING:
    from memstream_server.engine.background.indexer import Indexer
    from memstream_server.engine.background.vectors import MissingVectors
    from memstream_server.engine.operations.reembed import Reembedding

TYPE = "reindex"
UNIT = "fragments"


class Reindexing:
    """Starts and runs it. Recalls continue and report in `degraded` what they lack."""

    def __init__(
        self, runner: OperationRunner, indexer: Indexer, reembedding: Reembedding, missing: MissingVectors
    ) -> None:
        self._runner = runner
        self._indexer = indexer
        self._reembedding = reembedding
        self._missing = missing
        runner.register_type(TYPE, UNIT, self._run_reindex, undoes=True)

    async def start(self, embed: bool, missing: bool = False, answer: AnswerOf = None) -> Operation:
        """Raises ModelMismatch if `embed` is set and there is no next model."""
        payload = {
            "embed": embed,
            "missing": missing,
            "model": await self._reembedding.find_target() if embed else "",
        }
        return await self._runner.start(TYPE, "", "", json.dumps(payload), answer)

    async def _run_reindex(self, operation: Operation, progress: Progress) -> None:
        payload = json.loads(operation.payload)
        if payload["embed"]:
            await self._reembedding.run_operation(operation, progress)
        elif payload.get("missing"):
            await self._missing.embed_all(progress)
        else:
            await progress.check_cancelled()
            await self._indexer.rebuild_index(progress.report_done)
