"""Send a memory a few observations over one stream and ask questions about them. Start `memstream serve` first."""

from __future__ import annotations

import asyncio
import sys

import memstream

LINES = [
    ("Bob", "Hi, my name is Bob and I teach physics in Ulm."),
    ("Joy", "Nice to meet you, Bob!"),
    ("Bob", "On Sundays I bake bread. Last week the sourdough failed."),
    ("Bob", "My daughter Lena plays the cello."),
]


async def main(target: str) -> None:
    async with memstream.connect(target) as client:
        joy = await client.create_memory("comedy/joy", exist_ok=True)

        # Numbered, durable, and counted once, even if the connection or this process fails: a second run continues
        # with the number that the server expects and sends only the missing observations.
        async with joy.observe(producer="quickstart", session="monday") as stream:
            for speaker, line in LINES[stream.expected_sequence - 1 :]:
                await stream.send(line, speaker=speaker)
            await stream.flush()
            print(f"stored up to observation {stream.stored}, revision {stream.revision}")

        async with joy.recall() as recall:
            questions = ["What does Bob do on Sundays?", "Who plays an instrument?"]
            answers = await asyncio.gather(*(recall.query(each, limit=2, explain=True) for each in questions))
        for question, answer in zip(questions, answers, strict=True):
            print(f"\n{question}")
            for hit in answer:
                print(f"  {hit.score:.3f}  {hit.fragment.speaker}: {hit.fragment.content}")
                for part in hit.explanation.parts if hit.explanation else ():
                    print(f"         {part.name:<10} {part.value:.3f} x {part.weight:.3f} = {part.contribution:.3f}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:7700"))
