"""Runs the client steps of conformance cases with the Python SDK."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import memstream
from memstream import AckLevel, EventType, Memory

Ask = Callable[[str], Awaitable[None]]
RETRY = memstream.Retry(calls_s=60, first_s=60, delay_min_s=0.01, delay_max_s=0.2)
"""Patient, as `TIMEOUT_S`: a server takes its time to start, more of it on a busy machine."""
TIMEOUT_S = 120.0


async def run(address: str, step: dict[str, Any], ask: Ask) -> str:
    """Runs one step and returns what was wrong, or an empty text."""
    async with memstream.connect(address, timeout_s=TIMEOUT_S, retry=RETRY) as client:
        memory = client.memory(step["memory"])
        steps: dict[str, Callable[[], Awaitable[str]]] = {
            "observe": lambda: _observe(memory, step, ask),
            "flush": lambda: _flush(memory, step, ask),
            "listed": lambda: _listed(memory, step),
            "refused": lambda: _refused(memory, step),
            "outcomes": lambda: _outcomes(memory, step, ask),
            "recall": lambda: _recall(memory, step, ask),
            "stand": lambda: _stand(memory, step, ask),
            "give up": lambda: _give_up(memory, step),
            "watch": lambda: _watch(memory, step, ask),
            "no memory": lambda: _no_memory(memory, step),
            "too large": lambda: _too_large(memory, step),
            "late": lambda: _late(memory, step),
            "unknown values": lambda: _unknown_values(memory, step),
            "details": lambda: _details(memory, step),
            "away": lambda: _away(memory, step, ask),
            "abort": lambda: _abort(memory, ask),
            "renew": lambda: _renew(address, step, ask),
        }
        if step["client"] in steps:
            return await steps[step["client"]]()
    return f"there is no step {step['client']!r}"


async def secure(address: str, folder: Path) -> dict[str, str]:
    """Connects through a proxy that terminates mutual TLS and requires a token: valid, with a wrong token, without a
    certificate."""
    read = {name: (folder / name).read_bytes() for name in ("ca.pem", "client.key", "client.pem", "token")}
    token = read["token"].decode()
    mutual = memstream.Tls(read["ca.pem"], read["client.key"], read["client.pem"])
    found = {"mutual TLS and a token": await _talk(address, mutual, token)}
    other = await _talk(address, mutual, "another")
    found["another token"] = "" if "UNAUTHENTICATED" in other else f"it was {other!r}"
    unknown = await _talk(address, memstream.Tls(read["ca.pem"]), token)
    found["no certificate"] = "" if "Unavailable" in unknown else f"it was {unknown!r}"
    return found


async def _talk(address: str, tls: memstream.Tls, token: str) -> str:
    retry = memstream.Retry(first_s=1)
    try:
        async with memstream.connect(address, tls=tls, token=token, retry=retry) as client:
            memory = await client.create_memory("secure/joy", exist_ok=True)
            async with memory.observe("python") as stream:
                await stream.send("green tea")
            await memory.recall_once("tea")
    except memstream.MemstreamError as error:
        return f"{type(error).__name__} {error.reason}"
    return ""


def said(producer: str, number: int) -> str:
    """The observation with a number: a unique word, and one that all share."""
    return f"word{number} of {producer}"


async def _observe(memory: Memory, step: dict[str, Any], ask: Ask) -> str:
    async with memory.observe(step["producer"]) as stream:
        for number in range(stream.expected_sequence, step["upto"] + 1):
            await stream.send(said(step["producer"], number))
            if what := step["at"].get(str(number)):
                await ask(what)
    reached = (stream.received, stream.stored, stream.rejected_count)
    return "" if reached == (step["upto"], step["upto"], 0) else f"received, stored, rejected are {reached}"


async def _flush(memory: Memory, step: dict[str, Any], ask: Ask) -> str:
    async with memory.observe(step["producer"], ack_level=AckLevel.INDEXED) as stream:
        for number in range(stream.expected_sequence, step["upto"] + 1):
            await stream.send(said(step["producer"], number))
            if what := step["at"].get(str(number)):
                await ask(what)
            await stream.flush()
        await stream.flush()
        reached = (stream.stored, (await memory.stats()).unindexed)
    return "" if reached == (step["upto"], 0) else f"stored, not indexed are {reached}"


async def _listed(memory: Memory, step: dict[str, Any]) -> str:
    contents = [one.content async for one in memory.list_fragments(page_size=250)]
    expected = [said(step["producer"], number) for number in range(1, step["upto"] + 1)]
    return "" if contents == expected else f"there are {len(contents)}: {contents[:5]}..."


async def _refused(memory: Memory, step: dict[str, Any]) -> str:
    async with memory.observe(step["producer"]) as stream:
        good = await stream.send("tea")
        bad = await stream.send("x" * 100_000)
        other = await stream.send("rain")
        try:
            await bad
            return "it was not refused"
        except memstream.MemstreamError as error:
            if not _expected(error, step):
                return f"it was refused with {error!r}"
        await good
        await other
    return "" if (stream.stored, stream.rejected_count) == (3, 1) else f"stored is {stream.stored}"


async def _outcomes(memory: Memory, step: dict[str, Any], ask: Ask) -> str:
    """Each observation ends exactly once: rejected, or stored with its outcome."""
    sent: list[memstream.Sent] = []
    async with memory.observe(step["producer"], outcomes=True) as stream:
        for number in range(1, step["upto"] + 1):
            refused = number % step["refusedEvery"] == 0
            sent.append(await stream.send("x" * 100_000 if refused else said(step["producer"], number)))
            if what := step["at"].get(str(number)):
                await ask(what)
        await stream.flush()
    expected = [number for number in range(1, step["upto"] + 1) if number % step["refusedEvery"] == 0]
    found = [one.sequence for one in sent if one.error is not None and _expected(one.error, step)]
    if (found, stream.rejected_count) != (expected, len(expected)):
        return f"refused are {found}, rejected_count is {stream.rejected_count}"
    outcomes = [one.stored.outcome for one in sent if one.stored is not None]
    without = [one.sequence for one in sent if one.stored is not None and one.stored.outcome is None]
    ids = {one.fragment_id for one in outcomes if one is not None}
    enough = len(ids) == step["upto"] - len(expected)
    return "" if not without and enough else f"{len(ids)} ids, no outcome of {without}"


async def _recall(memory: Memory, step: dict[str, Any], ask: Ask) -> str:
    producer, numbers = step["producer"], range(1, step["upto"] + 1)
    async with memory.recall() as stream:
        asked = [asyncio.create_task(stream.query(f"word{number}", limit=1)) for number in numbers]
        await ask(step["during"])
        late = [asyncio.create_task(stream.query(f"word{number}", limit=1)) for number in numbers]
        for number, task in [*zip(numbers, asked, strict=True), *zip(numbers, late, strict=True)]:
            answer = await task
            if [one.fragment.content for one in answer] != [said(producer, number)]:
                return f"query {number} found {answer}"
    return "" if stream.connections > 1 else "the connection was never cut"


async def _stand(memory: Memory, step: dict[str, Any], ask: Ask) -> str:
    producer, expected, entered = step["producer"], list[str](), list[str]()
    async with (
        memory.observe(producer) as teller,
        memory.recall() as stream,
        stream.subscribe(f"what of {producer}?", limit=100) as standing,
    ):
        for number in range(1, step["upto"] + 1):
            expected.append(said(producer, number))
            await teller.send(expected[-1])
            if what := step["at"].get(str(number)):
                await ask(what)
            while expected[-1] not in entered:
                change = await anext(standing)
                entered += [one.fragment.content for one in change.entered]
                if change.changed or change.retracted or len(change.answer) != len(entered):
                    return f"after {number} the change is {change}"
    if sorted(entered) != sorted(expected):
        return f"entered are {entered}"
    return "" if stream.connections > 1 else "the connection was never cut"


async def _give_up(memory: Memory, step: dict[str, Any]) -> str:
    async with memory.recall() as stream:
        hanging = asyncio.create_task(stream.query("word1", min_revision=1_000_000))
        answers = await asyncio.gather(*(stream.query(f"word{number}", limit=1) for number in range(1, 6)))
        if hanging.done():
            return "the query for a revision to come was answered"
        hanging.cancel()
        await asyncio.gather(hanging, return_exceptions=True)
        last = await stream.query("word7", limit=1)
    found = [one.fragment.content for answer in [*answers, last] for one in answer]
    expected = [said(step["producer"], number) for number in (1, 2, 3, 4, 5, 7)]
    return "" if found == expected else f"found {found}"


async def _watch(memory: Memory, step: dict[str, Any], ask: Ask) -> str:
    seen: list[str] = []
    async with memory.watch("beginning", types=[EventType.OBSERVED]) as events:
        async for event in events:
            seen.append(event.fragment_id)
            if what := step["at"].get(str(len(seen))):
                await ask(what)
            if len(seen) == step["observed"]:
                break
    if len(set(seen)) != len(seen):
        return f"{len(seen)} events of {len(set(seen))} fragments"
    return ""


async def _no_memory(memory: Memory, step: dict[str, Any]) -> str:
    async def observe() -> None:
        async with memory.observe("p"):
            pass

    async def recall() -> None:
        async with memory.recall():
            pass

    for attempt in (memory.describe, observe, recall):
        try:
            await attempt()
            return "it is there"
        except memstream.MemstreamError as error:
            if not _expected(error, step):
                return f"it failed with {error!r}"
    return ""


async def _too_large(memory: Memory, step: dict[str, Any]) -> str:
    large = "x" * 20_000_000
    async with memory.observe(step["producer"]) as stream:
        try:
            await stream.send(large)
            return "it was sent"
        except memstream.InvalidRequest:
            await (await stream.send("tea"))
    if stream.stored != 1:
        return f"stored is {stream.stored}"
    try:
        await memory.recall_once(large)
    except memstream.MemstreamError as error:
        return "" if _expected(error, step) else f"it failed with {error!r}"
    return "it was answered"


async def _late(memory: Memory, step: dict[str, Any]) -> str:
    async with memory.recall() as stream:
        for ask in (memory.recall_once, stream.query):
            try:
                await ask("word1", min_revision=1_000_000, timeout_s=0.5)
                return "it was answered"
            except memstream.DeadlineExceeded as error:
                if not _expected(error, step):
                    return f"it failed with {error!r}"
        (hit,) = await stream.query("word7", limit=1)
    return "" if hit.fragment.content == said(step["producer"], 7) else f"found {hit}"


async def _unknown_values(memory: Memory, step: dict[str, Any]) -> str:
    (hit,) = await memory.recall_once("word1", limit=1)
    if (hit.fragment.content, hit.fragment.tier) != (said(step["producer"], 1), None):
        return f"found {hit}"
    async with memory.watch("beginning") as events:
        async for event in events:
            if event.type is EventType.UNKNOWN:
                return ""
    return "the watch ended"


async def _details(memory: Memory, step: dict[str, Any]) -> str:
    try:
        await memory.recall_once("")
    except memstream.MemstreamError as error:
        fields = [each.field for each in error.violations]
        return "" if fields == [step["field"]] and error.reason == "INVALID_FIELD" else f"it failed with {error!r}"
    return "it was answered"


async def _opened_observe(memory: Memory, producer: str) -> None:
    async with memory.observe(producer) as stream:
        assert stream.connections == 1


async def _opened_recall(memory: Memory) -> None:
    async with memory.recall() as stream:
        await stream.query("word1")


async def _first_event(memory: Memory) -> None:
    async with memory.watch("beginning") as events:
        await anext(events)


async def _away(memory: Memory, step: dict[str, Any], ask: Ask) -> str:
    """Starts each call while the server is unreachable; it succeeds."""
    await ask("away")
    begun = {
        "a call": memory.describe(),
        "a recall": memory.recall_once("word1"),
        "a batch": memory.observe_batch([said(step["producer"], step["upto"])]),
        "observe": _opened_observe(memory, "another"),
        "recall": _opened_recall(memory),
        "watch": _first_event(memory),
    }
    ended = await asyncio.gather(*begun.values(), return_exceptions=True)
    wrong = [
        f"{name} failed with {end!r}" for name, end in zip(begun, ended, strict=True) if isinstance(end, BaseException)
    ]
    return "; ".join(wrong)


async def _abort(memory: Memory, ask: Ask) -> str:
    """Starts each call while the server is unreachable, and cancels it."""
    await ask("down")
    begun = {
        "a call": asyncio.create_task(memory.describe()),
        "a recall": asyncio.create_task(memory.recall_once("word1")),
        "observe": asyncio.create_task(_opened_observe(memory, "p")),
        "recall": asyncio.create_task(_opened_recall(memory)),
        "watch": asyncio.create_task(_first_event(memory)),
    }
    await asyncio.sleep(0.2)
    for task in begun.values():
        task.cancel()
    ended = await asyncio.gather(*begun.values(), return_exceptions=True)
    await ask("up")
    wrong = [
        f"{name} ended with {end!r}"
        for name, end in zip(begun, ended, strict=True)
        if not isinstance(end, asyncio.CancelledError)
    ]
    return "; ".join(wrong)


async def _renew(address: str, step: dict[str, Any], ask: Ask) -> str:
    """Uses a client whose token function returns another token after the first one is revoked."""
    first, second = step["tokens"]
    current = [first]
    async with memstream.connect(address, retry=RETRY, token=lambda: current[0]) as client:
        memory = await client.create_memory(step["memory"])
        async with (
            memory.observe(step["producer"]) as stream,
            memory.recall() as recalls,
            memory.watch("beginning") as events,
        ):
            await stream.send(said(step["producer"], 1))
            await recalls.query("word1")
            await anext(events)
            current[0] = second
            await ask("revoke")
            async with asyncio.timeout(60):
                while min(stream.connections, recalls.connections, events.connections) < 2:
                    await (await stream.send(said(step["producer"], stream.expected_sequence)))
                    await recalls.query("word1")
                    await anext(events)
        await memory.describe()
    async with memstream.connect(address, retry=RETRY, token=first) as former:
        try:
            await _opened_observe(former.memory(step["memory"]), "p")
        except memstream.MemstreamError as error:
            return "" if _expected(error, step) else f"it failed with {error!r}"
    return "the revoked token was accepted"


def _expected(error: memstream.MemstreamError, step: dict[str, Any]) -> bool:
    actual = {"code": error.code.name, "reason": error.reason}
    return all(actual[key] == value for key, value in step["error"].items())
