"""With authentication: a receipt names who recalled, and only who may recall sees or replays it."""

from __future__ import annotations

import pytest

import memstream
from memstream import EventType
from memstream.errors import PermissionDenied
from tests.access.conftest import Guarded

QUESTION = "where is the pomegranate?"


async def test_only_who_may_recall_lists_and_replays_receipts(guarded: Guarded) -> None:
    async with memstream.connect(guarded.server.address, token=guarded.keys["root"]) as root:
        memory = await root.create_memory("v/receipts")
        await memory.observe_batch(["the pomegranate is in the garden"])
        cursor = memstream.Cursor((await memory.describe()).uid, 0)
    async with memstream.connect(guarded.server.address, token=guarded.keys["only-recall"]) as recaller:
        memory = recaller.memory("v/receipts")
        receipt = (await memory.recall_once(QUESTION, receipt=True)).receipt_id
        (listed,) = [one async for one in memory.list_receipts()]
        assert (listed.id, listed.what, listed.principal) == (receipt, QUESTION, "key:only-recall")
        assert (await memory.replay(receipt)).same
    for name in ("only-read", "only-write", "only-admin", "bob"):
        async with memstream.connect(guarded.server.address, token=guarded.keys[name]) as other:
            memory = other.memory("v/receipts")
            with pytest.raises(PermissionDenied):
                _ = [one async for one in memory.list_receipts()]
            with pytest.raises(PermissionDenied):
                await memory.replay(receipt)
    async with (
        memstream.connect(guarded.server.address, token=guarded.keys["only-read"]) as reader,
        reader.memory("v/receipts").watch(cursor, types=[EventType.RECALLED]) as events,
    ):
        event = await anext(events)
    assert event.receipt_id == receipt
    assert "pomegranate" not in repr(event)
