"""With authentication: callers change nothing without `observe`, and delete nothing without `forget`."""

from __future__ import annotations

import pytest

import memstream
from memstream import Fragment, Memory, MemoryKind
from memstream.errors import PermissionDenied
from tests.access.conftest import Guarded
from tests.support.waiting import until

KEY, LAST = "the key is under the mat", "a heron by the canal"


async def _listed(memory: Memory) -> dict[str, Fragment]:
    return {one.content: one async for one in memory.list_fragments()}


async def test_caller_that_may_not_observe_changes_nothing(guarded: Guarded) -> None:
    address, keys = guarded.server.address, guarded.keys
    async with (
        memstream.connect(address, token=keys["root"]) as root,
        memstream.connect(address, token=keys["only-recall"]) as reader,
    ):
        repeats = memstream.ShortTermPolicy(repeats=False)
        memory = await root.create_memory(
            "v/reads", kind=MemoryKind.LONG_TERM, policy=memstream.Policy(short_term=repeats)
        )
        await memory.observe_batch([KEY, LAST], session="monday")
        before = await _listed(memory)
        async with reader.memory("v/reads").recall(session="monday") as recall:
            assert (await recall.query("key", limit=1))[0].fragment.content == KEY
        assert (await reader.memory("v/reads").recall_once("key", limit=1))[0].fragment.content == KEY
        await memory.recall_once("heron", limit=1)

        async def written() -> bool:
            return (await _listed(memory))[LAST].access_count == 1

        await until(written)
        assert (await _listed(memory))[KEY] == before[KEY]
        await memory.observe_batch([KEY], session="monday")
        assert len([one async for one in memory.list_fragments()]) == 3, "no echo"


async def test_reinforcing_without_the_right_is_refused(guarded: Guarded) -> None:
    address, keys = guarded.server.address, guarded.keys
    async with memstream.connect(address, token=keys["root"]) as root:
        await (await root.create_memory("v/refused")).observe_batch([KEY])
    async with memstream.connect(address, token=keys["only-recall"]) as reader:
        memory = reader.memory("v/refused")
        with pytest.raises(PermissionDenied, match="the right observe"):
            await memory.recall_once("key", reinforce=True)
        async with memory.recall() as recall:
            with pytest.raises(PermissionDenied, match="the right observe"):
                await recall.query("key", reinforce=True)
            assert (await recall.query("key"))[0].fragment.content == KEY, "the stream continues"


@pytest.mark.parametrize(
    "deletion",
    [
        memstream.RemoveMessages("deleting", numbers=[1]),
        memstream.DeleteConversation("deleting"),
        memstream.DeleteState(memstream.StateScope.APP, "deleting"),
    ],
)
async def test_transactions_without_the_right_delete_nothing(
    guarded: Guarded, deletion: memstream.TransactionWrite
) -> None:
    address, keys = guarded.server.address, guarded.keys
    said = memstream.AppendMessages("deleting", [memstream.NewMessage(content="said")])
    kept = memstream.SetState(memstream.StateScope.APP, "deleting", "1")
    async with (
        memstream.connect(address, token=keys["root"]) as root,
        memstream.connect(address, token=keys["only-write"]) as writer,
    ):
        await writer.write_together("v", [said, kept])
        talk = root.conversation("v/deleting")
        before = [one async for one in talk.messages()], await root.get_state("v", memstream.StateScope.APP, "deleting")
        with pytest.raises(PermissionDenied, match="the right forget"):
            await writer.write_together("v", [said, deletion])
        after = [one async for one in talk.messages()], await root.get_state("v", memstream.StateScope.APP, "deleting")
        assert after == before


async def test_block_keeps_itself_only_by_the_right_to_recall(guarded: Guarded) -> None:
    """Who may write a block, but not recall its memory, cannot let it show what the memory holds."""
    address, keys = guarded.server.address, guarded.keys
    async with memstream.connect(address, token=keys["root"]) as root:
        await (await root.create_memory("v/kept")).observe_batch([KEY])
        await root.memory("v/kept").blocks.keep("mine", "Where is the key?")
    async with memstream.connect(address, token=keys["only-write"]) as writer:
        blocks = writer.memory("v/kept").blocks
        await blocks.put("theirs", "")
        with pytest.raises(PermissionDenied, match="the right recall"):
            await blocks.keep("theirs", "Where is the key?")
        with pytest.raises(PermissionDenied, match="the right recall"):
            await blocks.keep("mine", "Where is the heron?")
