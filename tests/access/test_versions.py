"""With authentication: a version names the caller that replaced it, and the history needs the right to read."""

from __future__ import annotations

import pytest

import memstream
from memstream import Observation
from memstream.errors import PermissionDenied
from tests.access.conftest import Guarded


async def test_a_version_names_the_caller_that_replaced_it(guarded: Guarded) -> None:
    async with memstream.connect(guarded.server.address, token=guarded.keys["alice"]) as alice:
        memory = await alice.create_memory("a/named")
        put = await memory.put_fragment(Observation("tea", external_id="drink"))
        await memory.put_fragment(Observation("coffee", external_id="drink"))
        assert put.fragment is not None
        id_ = put.fragment.id
    async with memstream.connect(guarded.server.address, token=guarded.keys["root"]) as root:
        await root.memory("a/named").update_fragment(id_, content="water")
        await root.memory("a/named").observe_batch([Observation("milk", external_id="drink")])
        history = await root.memory("a/named").fragment_history(id_)
    assert [(one.fragment.content, one.principal) for one in history.versions] == [
        ("water", "key:root"),
        ("coffee", "key:root"),
        ("tea", "key:alice"),
    ]
    async with memstream.connect(guarded.server.address, token=guarded.keys["bob"]) as bob:
        with pytest.raises(PermissionDenied):
            await bob.memory("a/named").fragment_history(id_)
        with pytest.raises(PermissionDenied):
            await bob.memory("a/named").restore_version(id_, history.versions[0].version)
