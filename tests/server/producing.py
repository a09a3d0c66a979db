"""Producers that never stop talking, and a ledger of what was acknowledged to them, for tests that kill the server."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

import memstream
from memstream import Memory

PATIENT = memstream.Retry(first_s=60.0, later_s=600.0, delay_max_s=0.3)
"""Reconnects soon, and does not give up while a server is started again."""


@dataclass(slots=True)
class Acknowledged:
    """The highest numbers a producer was told of."""

    received: int = 0
    stored: int = 0


def words(producer: str, number: int) -> str:
    """What a producer says under a number: the same after every restart, as a source that is read again."""
    return f"{producer} said {number} {'about the weather ' * (number % 5)}"


@dataclass(slots=True)
class Producer:
    """Says `words(name, n)` for n = 1, 2, ...; `run` is a process's life and may be cancelled and run again."""

    memory: Memory
    name: str
    draw: random.Random
    ledger: Acknowledged = field(default_factory=Acknowledged)
    connections: int = 0

    async def run(self) -> None:
        """Begins where the server says it stands, as a restarted process does, and goes on until cancelled."""
        async with self.memory.observe(self.name, session=self.name) as stream:
            assert stream.received >= self.ledger.received
            while True:
                for _ in range(self.draw.randint(1, 40)):
                    await stream.send(words(self.name, stream.expected_sequence))
                    self._note(stream)
                if self.draw.random() < 0.3:
                    await stream.flush()
                await asyncio.sleep(self.draw.random() * 0.02)
                self._note(stream)

    async def finish(self) -> None:
        """A few more words, all stored; then the numbers told are those of the end."""
        async with self.memory.observe(self.name, session=self.name) as stream:
            assert stream.received >= self.ledger.received
            assert stream.stored >= self.ledger.stored
            for _ in range(3):
                await stream.send(words(self.name, stream.expected_sequence))
            await stream.flush()
            assert stream.stored == stream.received == stream.expected_sequence - 1
            self._note(stream)

    def _note(self, stream: memstream.ObserveStream) -> None:
        self.ledger.received = max(self.ledger.received, stream.received)
        self.ledger.stored = max(self.ledger.stored, stream.stored)
        self.connections = stream.connections
