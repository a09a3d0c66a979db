"""One conversation in one memory, and split by session into many that are asked together: the share of evidence found.

    python benchmarks/split_memories.py --data DIRECTORY [--conversations N]

DIRECTORY has a measure and its conversations, as benchmarks/quality.py reads them. The two ways must find the same
within a point: the scale of scores must not depend on the size of a memory. Fails otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC
from pathlib import Path
from typing import Any

from quality import load_conversations
from served import BenchServer

import memstream

DEPTHS = (1, 4, 10)
APART_MAX = 0.01
"""Of the share at 10."""


async def fill_both(client: memstream.Client, number: int, turns: Sequence[Any]) -> tuple[str, list[str]]:
    """(path of the whole memory, paths of those of one session each)."""
    by_session: dict[str, list[memstream.Observation]] = defaultdict(list)
    for turn in turns:
        by_session[str(turn.session)].append(
            memstream.Observation(
                turn.text,
                speaker=turn.speaker,
                session=str(turn.session),
                observe_time=turn.timestamp.replace(tzinfo=UTC),
                external_id=turn.id,
            )
        )
    policy = {"score_importance": False}
    whole = await client.create_memory(f"whole/c{number}", kind=memstream.MemoryKind.LONG_TERM, policy=policy)
    parts = []
    for session, observations in by_session.items():
        part = await client.create_memory(
            f"parts/c{number}-{session}", kind=memstream.MemoryKind.LONG_TERM, policy=policy
        )
        parts.append(part.path)
        for memory in (whole, part):
            await memory.observe_batch(observations)
    return whole.path, parts


def share_found(answer: memstream.Answer, evidence: Sequence[str], depth: int) -> float:
    """Share of the evidence among the first recollections."""
    found = {one.external_id for hit in answer[:depth] for one in hit.fragments}
    return len(found & set(evidence)) / len(evidence)


async def measure(server: BenchServer, conversations: Sequence[Any]) -> dict[str, dict[int, float]]:
    """Mean share by way and depth."""
    found: dict[str, dict[int, list[float]]] = {way: defaultdict(list) for way in ("whole", "split")}
    async with memstream.connect(server.address) as client:
        for number, each in enumerate(conversations):
            whole, parts = await fill_both(client, number, each.fragments)
            for question in each.questions:
                if not question.evidence:
                    continue
                for way, paths in (("whole", [whole]), ("split", parts)):
                    answer = await client.recall_once(
                        paths, question.text, limit=max(DEPTHS), now=each.now.replace(tzinfo=UTC), reinforce=False
                    )
                    for depth in DEPTHS:
                        found[way][depth].append(share_found(answer, question.evidence, depth))
    return {way: {depth: sum(rows) / len(rows) for depth, rows in by.items()} for way, by in found.items()}


def main() -> int:
    """Print both ways; 1 if they are further apart than allowed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="directory of the measure")
    parser.add_argument("--conversations", type=int, default=6, help="how many")
    given = parser.parse_args()
    conversations = load_conversations(given.data)[: given.conversations]
    with tempfile.TemporaryDirectory() as scratch, BenchServer(Path(scratch) / "data", probed=False) as server:
        shares = asyncio.run(measure(server, conversations))
    for way, by_depth in shares.items():
        print(f"{way:6}", "  ".join(f"@{depth} {share:.3f}" for depth, share in by_depth.items()))
    deepest = max(DEPTHS)
    apart = shares["split"][deepest] - shares["whole"][deepest]
    print(f"split - whole @{deepest}: {apart:+.4f}, at most {APART_MAX} apart")
    return int(abs(apart) > APART_MAX)


if __name__ == "__main__":
    sys.exit(main())
