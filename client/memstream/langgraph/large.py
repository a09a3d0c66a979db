"""Values that a fragment cannot hold: each is the state document of a conversation of its own.

Rule 1. The fragment of an item names the conversation of its value, and both are written in one transaction. A
        conversation is written once: a key that is put again gets another one.
Rule 2. What no fragment names any more is deleted after the write. A crash in between leaves it for the next write or
        deletion of the key.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta

from memstream.client import Client
from memstream.errors import NotFound
from memstream.langgraph.items import ELSEWHERE
from memstream.langgraph.naming import Namespace, digest, external_id, namespace_label
from memstream.memory import Memory
from memstream.states import StateScope
from memstream.transactions import PutFragment, SetState, UpdateConversation
from memstream.values import Fragment, Observation

_UNIQUE = 32
"""Characters at the end of a name, which are random."""


def _prefix(namespace: Namespace, key: str = "") -> str:
    """What the names of the conversations of a namespace or of a key begin with."""
    return f"value-{digest(namespace_label(namespace))}-" + (f"{digest(key)}-" if key else "")


class LargeValues:
    """The large values of a store in the memstream namespace `namespace`."""

    def __init__(self, client: Client, namespace: str) -> None:
        self._client = client
        self._namespace = namespace

    async def put(self, memory: Memory, where: Namespace, key: str, observation: Observation, value: str) -> None:
        """Stores an item: its fragment, and the value next to it. Raises MemoryNotFound."""
        name = _prefix(where, key) + uuid.uuid4().hex
        metadata = {**observation.metadata, ELSEWHERE: name}
        await self._client.write_together(
            self._namespace,
            [
                UpdateConversation(name, ttl=observation.ttl, create=True),
                SetState(StateScope.SESSION, name, value),
                PutFragment(replace(observation, metadata=metadata)),
            ],
            memory=memory.name,
        )
        await self.clean(memory, where, [key])

    async def read(self, fragment: Fragment) -> str | None:
        """The value of an item as JSON; None if the item has got another one, or is deleted."""
        try:
            name = str(fragment.metadata[ELSEWHERE])
            return (await self._client.get_state(self._namespace, StateScope.SESSION, name)).document
        except NotFound:
            return None

    async def keep(self, name: str, ttl: timedelta) -> None:
        """Lets a value live from now on as long as its item."""
        with suppress(NotFound):
            await self._client.conversation(f"{self._namespace}/{name}").update(ttl=ttl)

    async def clean(self, memory: Memory, where: Namespace, keys: Sequence[str]) -> None:
        """Deletes the values of these keys that no fragment names."""
        prefix = _prefix(where, keys[0] if len(keys) == 1 else "")
        named = {_prefix(where, key): key for key in keys}
        listed = self._client.list_conversations(self._namespace, name_prefix=prefix)
        # Listed before the fragment is read: what it does not name then, no fragment will name later.
        found = [one.name async for one in listed if one.name[:-_UNIQUE] in named]
        for name in found:
            if await self._name_of(memory, named[name[:-_UNIQUE]]) != name:
                with suppress(NotFound):
                    await self._client.conversation(f"{self._namespace}/{name}").delete()

    async def _name_of(self, memory: Memory, key: str) -> object:
        try:
            fragment = await memory.get_fragment(external_id=external_id(key))
        except NotFound:
            return None
        return None if fragment.forget_time is not None else fragment.metadata.get(ELSEWHERE)
