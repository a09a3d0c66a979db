"""Roles of speakers, and replies as the companions of the messages that they answer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

import memstream
from memstream import Observation, Role
from memstream.mcp.tools import Tools
from tests.server.listing import fragments


async def _stream(parts: list[bytes]) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


async def test_role_is_kept_by_every_way_in(client: memstream.Client, path: str) -> None:
    memory = await client.create_memory(path)
    async with memory.observe("p") as stream:
        await stream.send("where is the ladder?", speaker="Ann", role=Role.USER)
    await memory.observe_batch([Observation("in the shed", role=Role.ASSISTANT)])
    put = await memory.put_fragment("ls: shed", role=Role.TOOL, external_id="k")
    seen = await Tools(client, path).observe("answer in one sentence", role="system")
    assert put.fragment is not None
    roles = {one.content: one.role for one in await fragments(memory)}
    assert list(roles.values()) == [Role.USER, Role.ASSISTANT, Role.TOOL, Role.SYSTEM]
    assert (await memory.update_fragment(seen.id, role=Role.USER)).role is Role.USER
    assert (await memory.update_fragment(seen.id, speaker="Bob")).role is Role.USER
    (replaced,) = (await memory.observe_batch([Observation("df: shed", external_id="k")])).outcomes
    assert (await memory.get_fragment(replaced.fragment_id)).role is None


async def test_role_survives_export_and_import(client: memstream.Client, path: str) -> None:
    memory = await client.create_memory(path)
    await memory.observe_batch([Observation("in the shed", role=Role.ASSISTANT), "without a role"])
    namespace, _, name = path.partition("/")
    parts = [part.lines async for part in client.export(namespace, name)]
    await client.finished(await client.import_(f"{namespace}-copy", _stream(parts)))
    copied = client.memory(f"{namespace}-copy/{name}")
    assert [one.role for one in await fragments(copied)] == [Role.ASSISTANT, None]


async def test_unknown_role_is_refused_by_name(client: memstream.Client, path: str) -> None:
    memory = await client.create_memory(path)
    with pytest.raises(memstream.InvalidArgument, match="role"):
        await memory.observe_batch([Observation("hello", role=cast("Any", "butler"))])
    assert await fragments(memory) == []
