"""docs/conformance.md from what the runners find (`python -m tests.conformance.table` runs all of them and writes)."""

from __future__ import annotations

import asyncio
import json
import re
import tempfile
from pathlib import Path

from tests.conformance.world import CASES, ROOT, cases_for, names, run
from tests.support.server import ServerProcess, free_address

PAGE = ROOT / "docs" / "conformance.md"
HEAD = """# Conformance

Clients in several languages and one server. What is below was run by each language against a real server, cut off
from it and with it killed where a case says so; the cases are JSON, in [tests/conformance](../tests/conformance), and
every language has a runner of them. So were the golden bytes there, which every message of the contract has: each
language reads them as they were meant and writes the same.

`python -m tests.conformance.table` runs everything and writes this page; the tests of `make test-all` compare it.
A dash is for what needs more than generated code, where a language has no more.
"""


def render(found: dict[str, dict[str, str]]) -> str:
    """The page, from what was wrong with each case by language."""
    parts = [HEAD]
    for file in CASES:
        head = f"\n## {json.loads(file.read_text('utf-8'))['about']}\n\n| case | {' | '.join(found)} |\n"
        parts.append(head + "|---|" + "---|" * len(found) + "\n")
        for name in names([file]):
            parts.append(f"| {name} | {' | '.join(_cell(one, name) for one in found.values())} |\n")
    return "".join(parts)


def _cell(found: dict[str, str], name: str) -> str:
    return "—" if name not in found else "fails" if found[name] else "passes"


def column(language: str) -> set[str]:
    """The cases that the page says pass in a language."""
    passing: set[str] = set()
    place = -1
    for line in PAGE.read_text("utf-8").splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if cells[:1] == ["case"]:
            place = cells.index(language) if language in cells else -1
        elif place > 0 and len(cells) > place and cells[place] == "passes":
            passing.add(cells[0])
    return passing


async def main() -> None:
    """Run every language and write the page."""
    from tests.toolchains.test_clients import RUNNERS  # here, for it imports this module

    found: dict[str, dict[str, str]] = {}
    for make in RUNNERS.values():
        runner = make()
        with (
            tempfile.TemporaryDirectory() as folder,
            ServerProcess(Path(folder) / "data", free_address(), index_flush_interval_s=0.1) as server,
        ):
            found[runner.language] = await run(runner, cases_for(runner), server)
    PAGE.write_text(render(found), "utf-8")


if __name__ == "__main__":
    asyncio.run(main())
