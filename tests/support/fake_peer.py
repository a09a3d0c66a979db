"""A trivial peer for tests of the driver: lines in a file or in a list, ranked by vectors alone.

Variants: `file`, `list`, `breaks` (recall raises) and `dies` (the process exits during `add`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers.protocol import Item, PeerOptions, Processes, Query, own_process, run_peer


class FakePeer:
    def __init__(self, given: PeerOptions) -> None:
        self._given = given
        self._lists: dict[str, list[str]] = {}

    def _file(self, memory: str) -> Path:
        return self._given.directory / f"{memory}.txt"

    async def open(self, memory: str) -> None:
        self._lists.setdefault(memory, [])
        self._file(memory).touch()

    async def add(self, memory: str, items: Sequence[Item]) -> None:
        print("a package's output is not a reply")
        if self._given.variant == "dies":
            os._exit(3)
        if self._given.variant != "file":
            self._lists[memory] += [item.line for item in items]
            return
        with self._file(memory).open("a", encoding="utf-8") as file:
            file.writelines(f"{item.line}\n" for item in items)

    async def recall(self, memory: str, query: Query, k: int) -> list[str]:
        if self._given.variant == "breaks":
            raise LookupError("there is no such thing")
        lines = await self.lines(memory)
        # Not in the table: the driver embeds these on request.
        vectors = self._given.vectors.look_up([f"{line}." for line in lines])
        asked = self._given.vectors.look_up_one(query.text)
        near = [sum(a * b for a, b in zip(asked, vector, strict=True)) for vector in vectors]
        return [lines[place] for place in sorted(range(len(lines)), key=lambda place: -near[place])][:k]

    async def lines(self, memory: str) -> list[str]:
        if self._given.variant != "file":
            return self._lists[memory]
        return self._file(memory).read_text("utf-8").splitlines()

    def processes(self) -> Processes:
        return own_process()

    async def close(self) -> None: ...


async def make_peer(given: PeerOptions) -> FakePeer:
    return FakePeer(given)


if __name__ == "__main__":
    run_peer(make_peer)
