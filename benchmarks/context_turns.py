"""Turns of an agent by Context: what a prompt cache reads, the evidence against a fresh recall, and the time.

    python benchmarks/context_turns.py --locomo FILE | --beam GIT [--turns N] [--budget TOKENS] [--limit N] [--blocks N]
        [--summary]

FILE: conversations with questions in LoCoMo's form. GIT: the git directory of a copy of the repository
mohammadtavakoli78/BEAM, of which chats 1 to 6 are taken. Each conversation becomes a memory; its questions are asked as
turns of one conversation of an agent, whose answers are the expected ones, and each turn also makes a fresh recall, in
turn first or second. A token that the cache reads costs 0.1, a written one 1.25, of one without a cache. Evidence is
lost if a recall that is not weak finds a gold message, and the text has neither it nor its words. A long memory is cut
to some sentences: of the words that the expected answer and the recalled gold messages have and the question has not,
"answer's words" is the share that the text before the question has.

--summary: the same turns again, in a conversation that feeds a memory of its own. A block of that memory keeps itself
from the conversation's messages without an LLM, and is the summary of what is cut. "with summary" counts the turns that
show it, "cuts" those in which the tail was cut, and "other breaks" those whose text does not begin with the last one
for another reason.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import median
from typing import Any

from served import BenchServer

import memstream
from memstream import ContextReason, Observation, PartKind

READ, WRITTEN = 0.1, 1.25
BATCH = 100
CHATS = range(1, 7)
COLUMNS = (
    *("talk", "turns", "tokens a turn", "read from cache", "cost", "gold recalled", "gold in text", "lost"),
    *("answer's words", "with summary", "cuts", "other breaks"),
    *("context p50 ms", "recall p50 ms", "ratio"),
)
CONTENT_MAX = 60_000
RECALL, PLAIN, SUMMARY = "recall", "", ", summary"
"""What a turn does; the last two name arms in the table."""
SUMMARY_QUESTION = "What was asked, and what was the answer?"
SUMMARY_LIMIT = 20


@dataclass(frozen=True)
class Question:
    """A question, its answer, and keys of the messages that have the evidence."""

    text: str
    answer: str
    gold: frozenset[str]


@dataclass(frozen=True)
class Talk:
    """Messages by key, and questions."""

    name: str
    said: list[tuple[str, Observation]]
    questions: list[Question]


@dataclass
class Sums:
    """What is counted over turns."""

    turns: int = 0
    tokens: int = 0
    unchanged: int = 0
    cost: float = 0.0
    gold: int = 0
    recalled: int = 0
    shown: int = 0
    lost: int = 0
    words: int = 0
    words_kept: int = 0
    summed: int = 0
    cuts: int = 0
    broken: int = 0
    context_s: list[float] = field(default_factory=list)
    recall_s: list[float] = field(default_factory=list)

    def row(self, name: str) -> str:
        context_ms, recall_ms = median(self.context_s) * 1e3, median(self.recall_s) * 1e3
        ratio = context_ms / recall_ms
        return (
            f"| {name} | {self.turns} | {self.tokens / self.turns:.0f} | {self.unchanged / self.tokens:.2f} "
            f"| {self.cost / self.tokens:.3f} | {self.recalled / max(1, self.gold):.3f} "
            f"| {self.shown / max(1, self.gold):.3f} | {self.lost / max(1, self.gold):.3f} "
            f"| {self.words_kept / max(1, self.words):.3f} | {self.summed} | {self.cuts} | {self.broken} "
            f"| {context_ms:.1f} | {recall_ms:.1f} | {ratio:.2f} |"
        )

    def add(self, other: Sums) -> None:
        for name in self.__dataclass_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass
class Arm:
    """A conversation of an agent with its contexts. `summary`: path of a block; empty: none."""

    chat: memstream.Conversation
    summary: str = ""
    turn: memstream.Context | None = None
    sums: Sums = field(default_factory=Sums)


def load_locomo(file: Path) -> Iterator[Talk]:
    """Long talks of two people."""
    for one in json.loads(file.read_text("utf-8")):
        talk, said = one["conversation"], []
        sessions = sorted(int(key.split("_")[1]) for key in talk if key.endswith("_date_time"))
        for session in sessions:
            begun = datetime.strptime(talk[f"session_{session}_date_time"], "%I:%M %p on %d %B, %Y").replace(tzinfo=UTC)
            for place, turn in enumerate(talk.get(f"session_{session}", [])):
                at = begun + timedelta(seconds=30 * place)
                made = Observation(turn["text"], speaker=turn["speaker"], session=f"s{session}", observe_time=at)
                said.append((turn["dia_id"], made))
        asked = [
            Question(each["question"], str(each.get("answer", "")), frozenset(each["evidence"]))
            for each in one["qa"]
            if each["category"] != 5
        ]
        yield Talk(one["sample_id"], said, asked)


def load_beam(git: Path) -> Iterator[Talk]:
    """Chats of a user and an assistant."""

    def read(path: str) -> Any:
        return json.loads(
            subprocess.run(["git", f"--git-dir={git}", "show", f"HEAD:{path}"], capture_output=True, check=True).stdout
        )

    for number in CHATS:
        said, at = [], datetime(2024, 1, 1, tzinfo=UTC)
        for session, batch in enumerate(read(f"chats/100K/{number}/chat.json")):
            for turn in (each for turns in batch["turns"] for each in turns):
                anchor = turn.get("time_anchor")
                at = datetime.strptime(anchor, "%B-%d-%Y").replace(tzinfo=UTC) if anchor else at + timedelta(minutes=2)
                text = turn["content"].split("->->")[0].strip()[:CONTENT_MAX]
                made = Observation(text, role=memstream.Role(turn["role"]), session=f"s{session}", observe_time=at)
                said.append((str(turn["id"]), made))
        asked = [
            Question(
                each["question"],
                str(each.get("ideal_response") or each.get("answer") or ""),
                frozenset(find_ids(each.get("source_chat_ids"))),
            )
            for found in read(f"chats/100K/{number}/probing_questions/probing_questions.json").values()
            for each in found
        ]
        yield Talk(f"beam-{number}", said, asked)


def find_ids(value: Any) -> Iterator[str]:
    """All message ids in a nested value."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from find_ids(each)
    elif str(value).isdigit():
        yield str(value)


async def fill_memory(client: memstream.Client, talk: Talk) -> tuple[memstream.Memory, dict[str, str]]:
    """The memory, and keys by fragment id. A repeat counts for the fragment that it repeats."""
    memory = await client.create_memory(f"bench/{talk.name}")
    keys: dict[str, str] = {}
    for start in range(0, len(talk.said), BATCH):
        part = talk.said[start : start + BATCH]
        stored = await memory.observe_batch([made for _, made in part], producer="load", first_sequence=start + 1)
        assert not stored.rejected, stored.rejected[0].error
        keys |= {(one.other_id or one.fragment_id): part[one.sequence - start - 1][0] for one in stored.outcomes}
    return memory, keys


async def measure_talk(client: memstream.Client, talk: Talk, given: argparse.Namespace) -> dict[str, Sums]:
    """The turns of one conversation by arm: without a summary, and with one if that is asked for."""
    memory, keys = await fill_memory(client, talk)
    for number in range(given.blocks):
        await memory.blocks.put(f"block-{number}", "I answer shortly and name the day. " * 8)
    words = {key: " ".join(str(made.body).casefold().split()) for key, made in talk.said}
    arms = {PLAIN: Arm(client.conversation(f"bench/{talk.name}-chat"))}
    if given.summary:
        arms[SUMMARY] = await begin_summary(client, talk)
    now = max(made.observe_time for _, made in talk.said if made.observe_time) + timedelta(days=1)
    for number in range(given.turns):
        question = talk.questions[number % len(talk.questions)]
        text = question.text if number < len(talk.questions) else f"{question.text} Once more."
        found: memstream.Answer | None = None
        recall_s = 0.0
        steps = [RECALL, *arms]
        for step in steps[number % len(steps) :] + steps[: number % len(steps)]:
            begun = time.perf_counter()
            if step == RECALL:
                found = await memory.recall_once(
                    text,
                    limit=given.limit,
                    now=now,
                    reinforce=False,
                    omit_working_memory=True,
                    session=arms[PLAIN].chat.name,
                )
                recall_s = time.perf_counter() - begun
            else:
                arm = arms[step]
                arm.turn = await client.context(
                    [memory.path],
                    text,
                    conversation=arm.chat.path,
                    blocks=[f"{memory.path}#block-{number}" for number in range(given.blocks)],
                    summary=arm.summary or None,
                    budget=given.budget,
                    after=arm.turn,
                    limit=given.limit,
                    memory_tokens=given.memory_tokens,
                    now=now,
                    reinforce=False,
                )
                arm.sums.context_s.append(time.perf_counter() - begun)
        assert found is not None
        for arm in arms.values():
            assert arm.turn is not None
            arm.sums.recall_s.append(recall_s)
            count_turn(arm.sums, arm.turn, found, question, keys, words)
            await arm.chat.append_messages(
                [
                    memstream.NewMessage(role="user", content=text),
                    memstream.NewMessage(role="assistant", content=question.answer or "I do not know."),
                ]
            )
    return {name: arm.sums for name, arm in arms.items()}


async def begin_summary(client: memstream.Client, talk: Talk) -> Arm:
    """A conversation that feeds a memory of its own, so that both arms recall the same, and a block there that keeps
    itself from the conversation's messages."""
    diary = await client.create_memory(f"bench/{talk.name}-diary", kind=memstream.MemoryKind.LONG_TERM)
    chat = client.conversation(f"bench/{talk.name}-summed")
    await chat.update(create=True, feed_memory=diary.name)
    of_chat = memstream.Filter(sessions=[chat.name])
    await diary.blocks.keep(
        "summary", SUMMARY_QUESTION, filter=of_chat, limit=SUMMARY_LIMIT, min_interval=timedelta(seconds=1)
    )
    return Arm(chat, f"{diary.path}#summary")


def count_turn(
    sums: Sums,
    turn: memstream.Context,
    found: memstream.Answer,
    question: Question,
    keys: dict[str, str],
    words: dict[str, str],
) -> None:
    """Add one turn."""
    sums.turns += 1
    sums.tokens += turn.tokens
    sums.unchanged += turn.unchanged_tokens
    sums.summed += any(part.kind is PartKind.SUMMARY for part in turn.parts)
    is_cut = any(one.kind is PartKind.MESSAGE and one.reason is ContextReason.BUDGET for one in turn.broken_by)
    sums.cuts += is_cut
    sums.broken += bool(turn.broken_by) and not is_cut
    sums.cost += READ * turn.unchanged_tokens + WRITTEN * (turn.tokens - turn.unchanged_tokens)
    text = " ".join(turn.text.casefold().split())
    shown = {keys.get(one.fragment_id, "") for one in turn.citations}
    recalled = {keys.get(one.id, "") for hit in found for one in hit.fragments} & question.gold
    if found.weak:
        recalled = set()
    sums.gold += len(question.gold)
    sums.recalled += len(recalled)
    known = {word for key in recalled for word in find_words(words[key])}
    wanted = (find_words(question.answer) & known) - find_words(question.text)
    sums.words += len(wanted)
    sums.words_kept += len(wanted & find_words(" ".join(part.text for part in turn.parts[:-1])))
    here = {key for key in question.gold if key in shown or (words.get(key) and words[key] in text)}
    sums.shown += len(here)
    sums.lost += len(recalled - here)


def find_words(text: str) -> set[str]:
    """Words of more than three characters, and numbers."""
    return {word for word in re.findall(r"\w+", text.casefold()) if len(word) > 3 or word.isdigit()}


async def run(given: argparse.Namespace) -> None:
    """Prints the table."""
    talks = [*(load_locomo(given.locomo) if given.locomo else ()), *(load_beam(given.beam) if given.beam else ())]
    totals: dict[str, Sums] = {}
    print(f"| {' | '.join(COLUMNS)} |")
    print(f"|{'---|' * len(COLUMNS)}")
    with tempfile.TemporaryDirectory() as folder, BenchServer(Path(folder)) as server:
        async with memstream.connect(server.address) as client:
            for talk in talks:
                for name, sums in (await measure_talk(client, talk, given)).items():
                    print(sums.row(f"{talk.name}{name}"), flush=True)
                    totals.setdefault(name, Sums()).add(sums)
    for name, sums in totals.items():
        print(sums.row(f"all{name}"))


def main() -> None:
    """Parses the arguments and runs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--locomo", type=Path)
    parser.add_argument("--beam", type=Path)
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--budget", type=int, default=8_000)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--memory-tokens", type=int, default=0)
    parser.add_argument("--blocks", type=int, default=0)
    parser.add_argument("--summary", action="store_true", help="the same turns again, with a summary of what is cut")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
