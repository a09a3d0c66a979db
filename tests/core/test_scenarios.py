"""The scenario files against the core, and the folding of what they recorded."""

from __future__ import annotations

from pathlib import Path

import pytest

from memstream_server.core.events import EventType
from memstream_server.core.replay_events import fold_all
from tests.core.memory import CoreMemory
from tests.support.replay import expectation, paths, replay
from tests.support.scenario import Driver, parse_scenario

FOLDER = Path(__file__).parent / "scenarios"
RESERVED = {
    EventType.ACCESSED,
    EventType.MODEL_ASKED,
    EventType.CONFLICT_SUSPECTED,  # in tests/engine/test_conflicts.py
    EventType.CONFLICT_RESOLVED,
    EventType.CONFLICT_ENDED,
    EventType.RECALLED,  # in tests/engine/test_recall_receipts.py
    EventType.IMPORTED,  # in tests/server/test_transfer.py
    EventType.RATED,  # in test_lifecycle.py
    EventType.MEMORY_CREATED,
    EventType.MEMORY_UPDATED,
}
"""Events that no decision about a newcomer or a request records."""


def text(path: Path) -> str:
    return path.read_text("utf-8")


@pytest.mark.parametrize("path", paths(FOLDER, "core"), ids=lambda path: path.stem)
async def test_scenario(path: Path) -> None:
    memory = CoreMemory()
    driver: Driver = memory
    actual = await replay(text(path), driver)
    assert actual == expectation(path, actual)
    assert fold_all(memory.history) == memory.places()


def test_scenarios_show_every_event() -> None:
    expected = [
        line.split()
        for path in FOLDER.glob("*.txt")
        for block in parse_scenario(path.read_text()).blocks
        for line in block.expected
    ]
    shown = {words[1] for words in expected if len(words) > 1}
    assert {event.value for event in EventType if event not in RESERVED} <= shown
