"""Images of a real server: the answers stay the same after a stop, a kill -9, an erasure and a restore."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path

import memstream
from memstream import Memory, MemoryKind, Observation, OperationState
from tests.cli.commands import run
from tests.server.conftest import MakeServer, restarted, started, stopped
from tests.server.test_erase import files_with
from tests.support.journals import only_sqlite
from tests.support.server import ServerProcess

pytestmark = only_sqlite("backup and restore")

COUNT = 1_000


async def ask(memory: Memory) -> list[object]:
    """Everything of an answer but recency, which the clock changes; a float's text tells all its bits."""
    found = await memory.recall_once("which line has the number 77?", explain=True, reinforce=False)
    answer: list[object] = []
    for one in found:
        assert one.explanation is not None
        parts = [repr(part) for part in one.explanation.parts if part.name != "recency"]
        answer.append((one.fragment.id, repr(one.relevance), parts))
    return answer


def images(server: ServerProcess) -> list[Path]:
    return sorted((server.data_dir / "images").iterdir())


async def test_answers_stay_the_same_across_the_life_of_an_image(make_server: MakeServer, tmp_path: Path) -> None:
    server, word = await started(make_server()), f"zq{uuid.uuid4().hex}"
    async with memstream.connect(server.address) as client:
        memory = await client.create_memory("images/joy", kind=MemoryKind.LONG_TERM)
        for start in range(0, COUNT, 500):
            lines = [Observation(f"line {number}", speaker="Bob") for number in range(start, start + 500)]
            await memory.observe_batch(lines)
        (secret,) = (await memory.observe_batch([Observation("the last line", session=word)])).outcomes
        expected = await ask(memory)
    assert await stopped(server) == 0
    (image,) = images(server)
    assert word.encode() in image.read_bytes()
    await started(server)
    async with memstream.connect(server.address) as client:
        memory = client.memory("images/joy")
        assert await ask(memory) == expected
        await memory.observe_batch([Observation("a later line with the number 77")])
        expected = await ask(memory)
    backup = tmp_path / "monday.memstream"
    assert run("backup", str(backup), "--data", str(server.data_dir)).returncode == 0
    await restarted(server)
    async with memstream.connect(server.address) as client:
        memory = client.memory("images/joy")
        assert await ask(memory) == expected
        assert images(server) == [image], "the later line is applied to it"
        ended = await client.finished(await memory.erase_fragments([secret.fragment_id]))
        assert ended.state is OperationState.SUCCEEDED
        assert files_with(server.data_dir, {word: word.encode()}) == {}
        await ask(memory)
    assert await stopped(server) == 0
    assert len(images(server)) == 1
    assert files_with(server.data_dir, {word: word.encode()}) == {}
    restore = ("restore", str(backup), "--data", str(server.data_dir), "--force")
    assert (await asyncio.to_thread(run, *restore)).returncode == 0
    assert not (server.data_dir / "images").exists()
    await started(server)
    async with memstream.connect(server.address) as client:
        assert await ask(client.memory("images/joy")) == expected
