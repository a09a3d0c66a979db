"""Producers that never stop, and a record of their acknowledgements, for tests that kill the server."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

import memstream
from memstream import Memory

PATIENT = memstream.Retry(first_s=60.0, later_s=600.0, delay_max_s=0.3, calls_s=60.0)
"""Reconnects soon, and does not give up while a server restarts; a call has its own timeout."""


@dataclass(slots=True)
class Acknowledged:
    """The highest acknowledged numbers of a producer."""

    received: int = 0
    stored: int = 0


CORRECTS_EVERY = 7


def words(producer: str, number: int) -> str:
    """The text of a number: the same after every restart, like a source that is read again."""
    return f"{producer} said {number} {'about the weather ' * (number % 5)}"


@dataclass(slots=True)
class Producer:
    """Sends `words(name, n)` for n = 1, 2, ...; `run` is the life of a process and may be cancelled and run again."""

    memory: Memory
    name: str
    draw: random.Random
    ledger: Acknowledged = field(default_factory=Acknowledged)
    connections: int = 0
    burst_max: int = 40
    pause_max_s: float = 0.02
    corrects: bool = False
    """Every CORRECTS_EVERY-th text supersedes the one sent that many before."""

    async def run(self) -> None:
        """Continues after the server's progress, like a restarted process, until cancelled."""
        async with self.memory.observe(self.name, session=self.name) as stream:
            assert stream.received >= self.ledger.received
            while True:
                for _ in range(self.draw.randint(1, self.burst_max)):
                    await self._send_next(stream)
                    self._note(stream)
                if self.draw.random() < 0.3:
                    await stream.flush()
                await asyncio.sleep(self.draw.random() * self.pause_max_s)
                self._note(stream)

    async def finish(self) -> None:
        """Sends a few more texts and waits until all are stored; the acknowledged numbers are then final."""
        async with self.memory.observe(self.name, session=self.name) as stream:
            assert stream.received >= self.ledger.received
            assert stream.stored >= self.ledger.stored
            for _ in range(3):
                await self._send_next(stream)
            await stream.flush()
            assert stream.stored == stream.received == stream.expected_sequence - 1
            self._note(stream)

    async def _send_next(self, stream: memstream.ObserveStream) -> None:
        number = stream.expected_sequence
        if not self.corrects or number % CORRECTS_EVERY:
            await stream.send(words(self.name, number))
            return
        before = [self.key(number - CORRECTS_EVERY)] if number > CORRECTS_EVERY else []
        await stream.send(words(self.name, number), external_id=self.key(number), supersedes=before)

    def key(self, number: int) -> str:
        """The external_id of a text that is superseded."""
        return f"{self.name}-{number}"

    def _note(self, stream: memstream.ObserveStream) -> None:
        self.ledger.received = max(self.ledger.received, stream.received)
        self.ledger.stored = max(self.ledger.stored, stream.stored)
        self.connections = stream.connections
