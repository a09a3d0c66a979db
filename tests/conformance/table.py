"""Writes docs/conformance.md from the results of all runners (`python -m tests.conformance.table`)."""

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

This page shows the results of clients in several languages with one server. Each language runs the cases below against
a real server; some cases cut its connections or kill it. The cases are JSON files in
[tests/conformance](../tests/conformance), and every language has a runner for them. The golden bytes there cover every
message of the contract: each language decodes them to their meaning and encodes them to the same bytes.

`python -m tests.conformance.table` runs everything and writes this page; the tests of `make test-all` compare it.
A dash marks a case that needs more than generated code in a language that has only generated code.
"""


def render(found: dict[str, dict[str, str]]) -> str:
    """Renders the page from the failures of each case by language."""
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
    """The cases that pass in a language, according to the page."""
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
    """Runs every language and writes the page."""
    from tests.toolchains.test_clients import RUNNERS  # imported here: it imports this module

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
