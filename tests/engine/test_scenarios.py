"""Runs the scenario files on the engine: journal, actor and recall between the commands and the events."""

from __future__ import annotations

from pathlib import Path

import pytest

from memstream_server.core.replay_events import fold_all, place_of
from memstream_server.engine.runtime.clock import Clock
from tests.engine.conftest import open_engine
from tests.engine.memory import EngineMemory, SettableClock
from tests.support.replay import expectation, paths, replay

FOLDER = Path(__file__).parent.parent / "core" / "scenarios"


def text(path: Path) -> str:
    return path.read_text("utf-8")


@pytest.mark.parametrize("path", paths(FOLDER, "engine"), ids=lambda path: path.stem)
async def test_scenario(path: Path, tmp_path: Path) -> None:
    clock = SettableClock()
    async with open_engine(tmp_path, clock=Clock(clock.now_us)) as engine:
        memory = EngineMemory(engine, clock)
        actual = await replay(text(path), memory)
        listed = {one.id: place_of(one) for one in await memory.fragments()}
    assert actual == expectation(path, actual)
    folded = {id_: (place.tier, place.sources, place.forgotten) for id_, place in fold_all(memory.history).items()}
    assert folded == {id_: (place.tier, place.sources, place.forgotten) for id_, place in listed.items()}
