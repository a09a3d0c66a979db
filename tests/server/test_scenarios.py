"""The scenario files, run by a real client of a real server."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import memstream
from memstream_server.core.replay_events import fold_all, place_of
from tests.server.listing import history
from tests.server.memory import ClientMemory, event_of
from tests.support.replay import expectation, paths, replay

FOLDER = Path(__file__).parent.parent / "core" / "scenarios"


@pytest.mark.parametrize("file", paths(FOLDER, "client"), ids=lambda file: file.stem)
async def test_scenario(file: Path, client: memstream.Client, path: str) -> None:
    text = await asyncio.to_thread(file.read_text, "utf-8")
    dimension = (await client.server_info()).embedding.dimension
    memory = ClientMemory(client, path.partition("/")[0], dimension)
    try:
        actual = await replay(text, memory)
        events = [event_of(one) for one in await history(memory.memory)]
        listed = {one.id: place_of(one) for one in await memory.fragments()}
    finally:
        await memory.close()
    assert actual == expectation(file, actual)
    folded = {id_: (place.tier, place.sources, place.forgotten) for id_, place in fold_all(events).items()}
    assert folded == {id_: (place.tier, place.sources, place.forgotten) for id_, place in listed.items()}
