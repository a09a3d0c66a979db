"""Converts LangGraph's items to fragments and back.

Search covers a fragment's content: the text of the indexed fields, one line each. If all or none of a value is indexed,
the content is the value itself as JSON; else the value is stored as JSON in the metadata. A value that is too large for
that is stored elsewhere (large.py); the content is the beginning of its text, as much as a fragment holds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from langgraph.store.base import Item, PutOp, SearchItem, get_text_at_path

from memstream.errors import InvalidArgument
from memstream.langgraph.naming import Namespace, external_id
from memstream.values import Fragment, MetadataValue, Observation

WHOLE = "$"
"""The path of the whole value."""
INDEXED = "indexed"
"""Metadata of every item: whether a query may find it."""
ID = "id"
"""Metadata of every item: the external id, with which a query can be restricted to some items."""
ELSEWHERE = "value_in"
"""Metadata of an item whose value is in a conversation: the conversation's name."""
_VALUE, _KEY, _TTL_S = "value", "key", "ttl_s"
CONTENT_MAX, METADATA_MAX = 1 << 16, 15 << 10
"""Bytes of a content, and of a value in the metadata, with the server's default settings."""


@dataclass(frozen=True, slots=True)
class StoredItem:
    """An item with its fragment."""

    id: str
    namespace: Namespace
    key: str
    value: dict[str, Any]
    created_at: datetime
    updated_at: datetime
    ttl_s: float | None
    etag: str
    value_in: str = ""
    """The conversation of a value that the fragment does not hold."""

    def item(self) -> Item:
        """The item that `get` returns."""
        return Item(
            namespace=self.namespace,
            key=self.key,
            value=self.value,
            created_at=self.created_at,
            updated_at=self.updated_at,
        )

    def search_item(self, score: float | None) -> SearchItem:
        """The item that `search` returns."""
        return SearchItem(
            namespace=self.namespace,
            key=self.key,
            value=self.value,
            created_at=self.created_at,
            updated_at=self.updated_at,
            score=score,
        )


def observation_of(put: PutOp, fields: Sequence[str]) -> tuple[Observation, str]:
    """The observation of an item, and its value as JSON if a fragment cannot hold it, else ""; `fields` are the default
    index. Raises InvalidArgument for a value that is not JSON."""
    value: Mapping[str, Any] = put.value or {}
    try:
        whole = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument("value", f"cannot be written as JSON: {error}") from error
    paths = [] if put.index is False else list(fields if put.index is None else put.index)
    texts = [text for path in paths for text in _texts(value, path)]
    metadata: dict[str, MetadataValue] = {INDEXED: bool(texts), ID: external_id(put.key)}
    beside = bool(texts) and paths != [WHOLE]
    content = "\n".join(texts) if beside else whole
    is_large = _size(content) > CONTENT_MAX or (beside and _size(whole) > METADATA_MAX)
    if is_large:
        content = content.encode("utf-8", "replace")[:CONTENT_MAX].decode("utf-8", "ignore")
    elif beside:
        metadata[_VALUE] = whole
    if external_id(put.key) != put.key:
        metadata[_KEY] = put.key
    if put.ttl is not None:
        metadata[_TTL_S] = put.ttl * 60
    observation = Observation(
        content,
        external_id=external_id(put.key),
        metadata=metadata,
        ttl=None if put.ttl is None else timedelta(minutes=put.ttl),
    )
    return observation, whole if is_large else ""


def _size(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def _texts(value: Mapping[str, Any], path: str) -> list[str]:
    texts: list[str] = get_text_at_path(value, path)
    return [text for text in texts if text and not text.isspace()]


def stored_item(namespace: Namespace, fragment: Fragment, now: datetime, value: str | None = None) -> StoredItem | None:
    """The item of a fragment; None if it is forgotten, expired, or not from a store. `value` is one from elsewhere."""
    expired = fragment.expire_time is not None and fragment.expire_time <= now
    if INDEXED not in fragment.metadata or fragment.forget_time is not None or expired:
        return None
    created = fragment.create_time or datetime.fromtimestamp(0, UTC)
    ttl_s = fragment.metadata.get(_TTL_S)
    return StoredItem(
        id=fragment.id,
        namespace=namespace,
        key=str(fragment.metadata.get(_KEY, fragment.external_id)),
        value=json.loads(value or str(fragment.metadata.get(_VALUE, fragment.content))),
        created_at=created,
        updated_at=max(created, fragment.observe_time or created),
        ttl_s=float(ttl_s) if isinstance(ttl_s, int | float) else None,
        etag=fragment.etag,
        value_in=str(fragment.metadata.get(ELSEWHERE, "")),
    )
