"""Replays scenarios: runs a file's commands against a driver and prints the results, with aliases for ids."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from memstream_server.core.events import Event, EventType, Reason
from memstream_server.core.values import Fragment, Tier
from tests.support.scenario import (
    Block,
    Change,
    Command,
    Driver,
    change_of,
    overrides_of,
    parse_command,
    parse_scenario,
    query_of,
    render,
    said_of,
    spec_of,
)


class Runner:
    """Runs blocks against one driver and prints the results, with aliases for ids."""

    def __init__(self, driver: Driver, *, draws: bool = False) -> None:
        self._driver = driver
        self._draws = draws
        self._aliases: dict[str, str] = {}

    async def run(self, block: Block) -> list[str]:
        printed: list[str] = []
        for line in block.commands:
            printed += await self._run_command(self._resolve_aliases(parse_command(line)))
            printed += [self._format_event(event) for event in await self._driver.events() if event.fragment]
        return printed

    async def _run_command(self, command: Command) -> list[str]:
        driver = self._driver
        match command.name:
            case "memory":
                self._aliases = {}
                await driver.create(spec_of(command))
            case "policy":
                await driver.set_policy(overrides_of(command.options))
            case "observe":
                id_ = await driver.observe(said_of(command))
                self._alias_for(id_, "f")
            case "recall":
                hits = await driver.recall(query_of(command))
                return [" ".join(["hits", *(self._alias(id_) for id_ in hits)])]
            case "state":
                return self._format_state(await driver.fragments())
            case "clear":
                await driver.clear([Tier(word) for word in command.words])
            case "forget":
                await driver.forget(command.words)
            case "restore":
                await driver.restore(command.words)
            case "erase":
                await driver.erase(command.words)
            case "update":
                await driver.update(change_of(command))
            case "pin" | "unpin":
                await driver.update(Change(command.words[0], pinned=command.name == "pin"))
            case _:
                return [self._replace_ids(line) for line in await self._run_other(command)]
        return []

    async def _run_other(self, command: Command) -> list[str]:
        if command.name == "supersede":
            return [await self._driver.supersede(command.words[0].split(","), command.text("by"))]
        return await self._driver.extra(command)

    def _resolve_aliases(self, command: Command) -> Command:
        """The command with ids in place of aliases, in words, `sources`, `supersedes` and `by`."""
        ids = {alias: id_ for id_, alias in self._aliases.items()}
        options = dict(command.options)
        for name in ("sources", "supersedes", "by"):
            if isinstance(given := options.get(name), str):
                options[name] = ",".join(ids.get(word, word) for word in given.split(","))
        words = (
            ",".join(ids.get(part, part) for part in word.split(",")) if command.name == "supersede" else word
            for word in command.words
        )
        return Command(command.name, tuple(ids.get(word, word) for word in words), options)

    def _alias_for(self, id_: str, letter: str) -> str:
        """The alias of an id, assigned on first use."""
        count = sum(alias.startswith(letter) for alias in self._aliases.values())
        return self._aliases.setdefault(id_, f"{letter}{count + 1}")

    def _alias(self, id_: str) -> str:
        return self._alias_for(id_, "f")

    def _replace_ids(self, line: str) -> str:
        for id_, alias in self._aliases.items():
            line = line.replace(id_, alias)
        return line

    def _format_event(self, event: Event) -> str:
        letter = "i" if event.type is EventType.REFLECTED else "f"
        parts = [self._alias_for(event.fragment, letter), event.type.value, *_tier_change(event)]
        if event.other:
            parts.append(f"{_PREPOSITIONS.get(event.type, 'by')} {self._alias(event.other)}")
        if event.cosine is not None:
            parts.append(f"cosine={event.cosine:.3f}")
        if event.draw is not None and self._draws:
            parts.append(f"draw={event.draw:.3f}")
        if event.importance is not None:
            parts.append(f"importance={event.importance:g}")
        if event.reason is not Reason.NONE:
            parts.append(f"reason={event.reason}")
        if event.sources:
            parts.append("sources=" + ",".join(self._alias(id_) for id_ in event.sources))
        return " ".join(parts)

    def _format_state(self, fragments: Sequence[Fragment]) -> list[str]:
        tiers = list(Tier)
        ordered = sorted(fragments, key=lambda one: (tiers.index(one.tier), one.position))
        return [self._format_fragment(fragment) for fragment in ordered] or ["(empty)"]

    def _format_fragment(self, fragment: Fragment) -> str:
        content = json.dumps(fragment.content, ensure_ascii=False)
        parts = [fragment.tier.value, self._alias(fragment.id), content, f"importance={fragment.importance:g}"]
        if fragment.enhancement_count:
            parts.append(f"enhancements={fragment.enhancement_count}")
        if fragment.duplicate_count:
            parts.append(f"duplicates={fragment.duplicate_count}")
        if fragment.sources:
            parts.append("sources=" + ",".join(self._alias(id_) for id_ in fragment.sources))
        if fragment.pinned:
            parts.append("pinned")
        if fragment.forget_time_us is not None:
            parts.append("forgotten")
        if fragment.superseded_by:
            parts.append(f"superseded_by={self._alias(fragment.superseded_by)}")
        return " ".join(parts)


_PREPOSITIONS = {EventType.MERGED: "into"}


def _tier_change(event: Event) -> list[str]:
    if event.from_tier and event.to_tier:
        return [f"{event.from_tier} -> {event.to_tier}"]
    if event.to_tier:
        return [f"-> {event.to_tier}"]
    return [f"from {event.from_tier}"] if event.from_tier else []


async def replay(text: str, driver: Driver) -> str:
    """Run a file's text against a driver; returns the text with the actual output in place of the expected output."""
    scenario = parse_scenario(text)
    runner = Runner(driver, draws=scenario.directives.get("draws") == "shown")
    return render(scenario, [await runner.run(block) for block in scenario.blocks])


def paths(folder: Path, driver: str) -> list[Path]:
    """The scenario files of `folder` that the named driver can run."""
    return [path for path in sorted(folder.glob("*.txt")) if driver in parse_scenario(path.read_text("utf-8")).drivers]


def expectation(path: Path, actual: str) -> str:
    """The text of the file; with MEMSTREAM_REWRITE=1 the actual output is written to it first."""
    if os.environ.get("MEMSTREAM_REWRITE") == "1":
        path.write_text(actual, "utf-8")
    return path.read_text("utf-8")
