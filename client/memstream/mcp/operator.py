"""The operator's tools: history, receipts and replays, restoring, and edits of blocks."""

from __future__ import annotations

from memstream.blocks import BlockInfo
from memstream.mcp.results import (
    BlockWritten,
    Earlier,
    History,
    Recalled,
    Receipt,
    Receipts,
    Remembered,
    Replayed,
    Restored,
    earlier_fields,
    recalled_fields,
    receipt_fields,
    remembered_fields,
)
from memstream.mcp.schema import (
    BlockName,
    BlockText,
    Corrected,
    Etag,
    Id,
    Memory,
    NewText,
    OldText,
    ReceiptId,
    ReceiptsLimit,
)
from memstream.mcp.tools import Tools


class OperatorTools(Tools):
    """The tools of agents, and those of an operator."""

    async def history(self, id: Id, memory: Memory = "") -> History:
        """Show what one fragment said before it was changed, the latest version first."""
        path = self._resolve_memory(memory)
        (whole,) = await self._whole_ids(path, [id])
        found = await self._client.memory(path).fragment_history(whole)
        versions = [
            Earlier(version=one.version, replaced=one.replace_time, by=one.principal, **earlier_fields(one.fragment))
            for one in found.versions
        ]
        return History(current=Remembered(**remembered_fields(found.fragment)), versions=versions)

    async def receipts(self, limit: ReceiptsLimit = 20, memory: Memory = "") -> Receipts:
        """List earlier recalls that asked for a receipt, the latest first: what was asked, and which fragments came."""
        path = self._resolve_memory(memory)
        found: list[Receipt] = []
        async for one in self._client.memory(path).list_receipts(page_size=limit + 1):
            if len(found) == limit:
                return Receipts(memory=path, receipts=found, more=True)
            found.append(Receipt(**receipt_fields(one)))
        return Receipts(memory=path, receipts=found)

    async def replay(self, id: ReceiptId, memory: Memory = "") -> Replayed:
        """Answer the query of a receipt again, from the memory as it was then; says whether the ranking is the same."""
        path = self._resolve_memory(memory)
        found = await self._client.memory(path).replay(id)
        return Replayed(
            receipt=Receipt(**receipt_fields(found.receipt)),
            same=found.same,
            recollections=[Recalled(**recalled_fields(hit)) for hit in found.answer or ()],
            differences=[
                " ".join(filter(None, (one.type.replace("_", " "), one.fragment_id, one.recorded, one.present)))
                for one in found.differences
            ],
        )

    async def restore(self, ids: Corrected, memory: Memory = "") -> Restored:
        """Bring back forgotten or corrected fragments by their ids; those that are gone for good stay gone."""
        path = self._resolve_memory(memory)
        known = [self._ids.get(one) or one for one in ids]  # a listing has no forgotten ones
        return Restored(restored=await self._client.memory(path).restore_fragments(known))

    async def write_block(self, name: BlockName, text: BlockText, etag: Etag = "", memory: Memory = "") -> BlockWritten:
        """Write a block, a small named text that is always in the context; creates it if necessary."""
        blocks = self._client.memory(self._resolve_memory(memory)).blocks
        return _written(await blocks.put(name, text, etag=etag))

    async def edit_block(
        self, name: BlockName, new: NewText, old: OldText = "", etag: Etag = "", memory: Memory = ""
    ) -> BlockWritten:
        """Replace a text that occurs once in a block, or add lines at its end."""
        blocks = self._client.memory(self._resolve_memory(memory)).blocks
        return _written(
            await blocks.replace(name, old, new, etag=etag) if old else await blocks.append(name, new, etag=etag)
        )


def _written(block: BlockInfo) -> BlockWritten:
    return BlockWritten(name=block.name, etag=block.etag, version=block.version, tokens=block.tokens)
