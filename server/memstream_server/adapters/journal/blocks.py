"""`ports.blocks.BlockStore` on the journal's database: same file, writer and snapshots.

A write locks the memory's row, which has the last version: servers that share a database need no owner for it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from sqlalchemy import (
    BindParameter,
    Connection,
    Row,
    bindparam,
    case,
    delete,
    func,
    insert,
    literal,
    select,
    union,
    update,
)

from memstream_server.adapters.journal.database.database import Read, Write, run_compiled
from memstream_server.adapters.journal.sql import codec
from memstream_server.adapters.journal.sql.answers import put_answer
from memstream_server.adapters.journal.sql.bulk import split_ids
from memstream_server.adapters.journal.sql.schema import (
    POSITION_BITS,
    block_sources,
    blocks,
    fragments,
    key_position,
    key_range,
    memories,
    row_key,
    standing_blocks,
    standing_memories,
)
from memstream_server.ports.blocks import (
    AskedMemory,
    Block,
    BlockDiffers,
    BlockName,
    BlocksFull,
    Decide,
    DueBlocks,
    MemoryName,
    NoBlock,
    NoMemory,
    SourcesChanged,
    StandingState,
    Writing,
)
from memstream_server.ports.conversations import AnswerOf
from memstream_server.ports.journal.errors import StaleWrite

_number: BindParameter[int] = bindparam("m")
_name: BindParameter[str] = bindparam("b")
_low: BindParameter[int] = bindparam("low")
_high: BindParameter[int] = bindparam("high")
_MEMORY = select(memories.c.number, memories.c.uid, memories.c.block_version).where(
    memories.c.namespace == bindparam("ns"), memories.c.name == bindparam("n")
)
_BY_UID = (
    select(memories.c.number, memories.c.block_version)
    .where(memories.c.uid == bindparam("u"))
    .with_for_update(key_share=True)
)
_OF_MEMORY = select(blocks).where(blocks.c.key.between(_low, _high)).order_by(blocks.c.key)
_LOCKED = _MEMORY.with_for_update(key_share=True)
_RAISE = update(memories).where(memories.c.number == _number).values(block_version=bindparam("v"))
_NAMED = (blocks.c.memory == _number) & (blocks.c.name == _name)
# The range of keys bounds the read even where the database walks the keys instead of the index of names.
_LATEST = (
    select(blocks).where(_NAMED, blocks.c.key.between(_low, _high)).order_by(blocks.c.key.desc()).limit(bindparam("k"))
)
_PRESENT = (
    select(blocks.c.name, func.max(blocks.c.key).label("key"))
    .where(blocks.c.memory == _number, blocks.c.name > bindparam("after"))
    .group_by(blocks.c.name)
    .order_by(blocks.c.name)
    .limit(bindparam("k"))
)
_OF_KEYS = select(blocks).where(blocks.c.key.in_(bindparam("keys", expanding=True))).order_by(blocks.c.name)
_COUNT = select(func.count(blocks.c.name.distinct())).where(blocks.c.memory == _number)
_OVER = select(blocks.c.key).where(_NAMED, blocks.c.key.between(_low, _high)).order_by(blocks.c.key.desc())
_UP_TO = select(blocks.c.key).where(_NAMED, blocks.c.key <= bindparam("last"))
_ALL = select(blocks.c.key).where(_NAMED)
_keys: BindParameter[Any] = bindparam("keys", expanding=True)
_ERASE = (delete(block_sources).where(block_sources.c.key.in_(_keys)), delete(blocks).where(blocks.c.key.in_(_keys)))
NO_LIMIT = 1 << 30
_MADE_OF = select(blocks.c.key, blocks.c.sources).where(blocks.c.memory == _number, blocks.c.sources.is_not(None))
_OF_OTHERS = select(block_sources.c.key).where(block_sources.c.source == _number)
_SOURCES_OF = select(blocks.c.key, blocks.c.sources).where(blocks.c.key.in_(_keys))
_COPIED = select(bindparam("new", type_=block_sources.c.key.type), block_sources.c.source)
_COPY_SOURCES = insert(block_sources).from_select(
    ["key", "source"], _COPIED.where(block_sources.c.key == bindparam("old"))
)
_SOURCES = (
    select(memories.c.number, memories.c.uid)
    .where(memories.c.uid.in_(bindparam("uids", expanding=True)))
    .order_by(memories.c.number)
    .with_for_update(key_share=True)
)
_VERSION = select(memories.c.block_version).where(memories.c.number == _number).with_for_update(key_share=True)
_PAYLOAD = select(blocks.c.payload).where(blocks.c.key == bindparam("k"))
_CONTENTS = select(fragments.c.id, fragments.c.payload).where(
    fragments.c.memory == _number,
    fragments.c.id.in_(bindparam("ids", expanding=True)),
    fragments.c.forget_time_us.is_(None),
)
_states = standing_blocks.c
_STATES = select(standing_blocks).where(_states.memory == _number)
_FORGET_STATE = delete(standing_blocks).where(_states.memory == _number, _states.name == _name)
_HAS_LATER = select(literal(1)).where(_NAMED, blocks.c.key > bindparam("last")).exists()
_SET_STATE = update(standing_blocks).where(_states.memory == _number, _states.name == _name, ~_HAS_LATER)
_OF_PUBLISHED = standing_blocks.join(memories, (memories.c.number == _states.memory) & (memories.c.namespace != ""))
_asked = standing_memories.c
_ASKED = select(standing_memories).where(_asked.memory == _number)
_FORGET_ASKED = delete(standing_memories).where(_asked.memory == _number, _asked.block == _name)
_SET_ASKED = (
    update(standing_memories)
    .where(_asked.memory == _number, _asked.block == _name)
    .where(_asked.namespace == bindparam("ns"), _asked.name == bindparam("n"))
    .values(uid=bindparam("u"), revision=bindparam("r"))
)
_now_there = memories.alias("now_there")
_WITH_PRESENT = standing_memories.outerjoin(
    _now_there, (_now_there.c.namespace == _asked.namespace) & (_now_there.c.name == _asked.name)
)
_uid_now = func.coalesce(_now_there.c.uid, "")
_READ_ASKED = (
    select(_asked.namespace, _asked.name, _uid_now.label("uid"), func.coalesce(_now_there.c.revision, -1).label("r"))
    .select_from(_WITH_PRESENT)
    .where(_asked.memory == select(memories.c.number).where(memories.c.uid == bindparam("u")).scalar_subquery())
    .where(_asked.block == _name)
)
_HAS_CHANGED = (
    select(literal(1))
    .select_from(_WITH_PRESENT)
    .where(_asked.memory == _states.memory, _asked.block == _states.name)
    .where((_uid_now != _asked.uid) | (_now_there.c.revision > _asked.revision))
    .correlate(standing_blocks)
    .exists()
)
_BEHIND = (_states.revision < memories.c.revision) | _HAS_CHANGED
_now: BindParameter[int] = bindparam("now")
_IS_DUE = (_BEHIND & (_states.rest_us <= _now)) | (_states.look_us <= _now)
# Each renewal, also a failed one, moves rest_us past its time: the least is of the block that has waited longest.
_DUE = (
    select(memories.c.uid, _states.name)
    .select_from(_OF_PUBLISHED)
    .where(_IS_DUE)
    .order_by(_states.rest_us, _states.memory, _states.name)
    .limit(bindparam("k"))
)
_NEXT = (
    select(func.min(case((_BEHIND, _states.rest_us), else_=_states.look_us))).select_from(_OF_PUBLISHED).where(~_IS_DUE)
)
_STANDING = union(
    select(memories.c.uid).where(memories.c.number.in_(select(_states.memory)), memories.c.namespace != ""),
    select(_now_there.c.uid).select_from(_WITH_PRESENT).where(_now_there.c.uid.is_not(None)),
)


class SqlBlocks:
    """`ports.blocks.BlockStore` over a journal's writer and readers."""

    def __init__(self, write: Write, read: Read) -> None:
        self._write = write
        self._read = read

    async def read_blocks(self, names: Sequence[BlockName]) -> dict[BlockName, Block]:
        return await self._read(lambda c: read_blocks(c, names))

    async def get_block(self, name: BlockName, version: int = 0) -> Block:
        return await self._read(lambda c: _get_block(c, name, version))

    async def list_blocks(self, memory: MemoryName, after: str, limit: int) -> list[Block]:
        return await self._read(lambda c: _list_blocks(c, memory, after, limit))

    async def list_versions(self, name: BlockName, before: int | None, limit: int) -> list[Block]:
        return await self._read(lambda c: _list_versions(c, name, before, limit))

    async def read_versions(self, memory: MemoryName) -> tuple[str, dict[str, int]]:
        return await self._read(lambda c: _read_versions(c, memory))

    async def write_block(
        self, name: BlockName, decide: Decide, writing: Writing, answer: AnswerOf[Block] = None
    ) -> Block:
        def work(connection: Connection) -> Block:
            block = _write_block(connection, name, decide, writing)
            put_answer(connection, None if answer is None else answer(block))
            return block

        return await self._write(work, 4, True)

    async def find_due(self, now_us: int, limit: int) -> DueBlocks:
        return await self._read(lambda c: _find_due(c, now_us, limit))

    async def list_standing(self) -> frozenset[str]:
        return await self._read(lambda c: frozenset(c.execute(_STANDING).scalars()))

    async def read_asked(self, uid: str, name: str) -> tuple[AskedMemory, ...]:
        def work(connection: Connection) -> tuple[AskedMemory, ...]:
            rows = connection.execute(_READ_ASKED, {"u": uid, "b": name})
            return tuple([AskedMemory(MemoryName(row.namespace, row.name), row.uid, row.r) for row in rows])

        return await self._read(work)

    async def forget_asked(self) -> None:
        await self._write(lambda c: c.execute(update(standing_memories).values(revision=-1)), 10, False)

    async def set_state(self, uid: str, name: str, state: StandingState, version: int | None = None) -> None:
        def work(connection: Connection) -> None:
            memory = connection.execute(_BY_UID, {"u": uid}).one_or_none()
            if memory is not None:
                _set_state(connection, memory.number, name, state, version)

        await self._write(work, 2, False)

    async def add_versions(self, uid: str, versions: Sequence[Block], versions_max: int, last: int = 0) -> None:
        await self._write(lambda c: _add_versions(c, uid, versions, versions_max, last), 2 + len(versions), True)

    async def delete_block(self, name: BlockName, version: int | None, answer: AnswerOf[bool] = None) -> bool:
        def work(connection: Connection) -> bool:
            deleted = _delete_block(connection, name, version)
            put_answer(connection, None if answer is None else answer(deleted))
            return deleted

        return await self._write(work, 4, False)


# ---- reads


def _find_memory(connection: Connection, memory: MemoryName, *, lock: bool = False) -> Any:
    found = connection.execute(_LOCKED if lock else _MEMORY, {"ns": memory.namespace, "n": memory.memory})
    row = found.one_or_none()
    if row is None:
        raise NoMemory(memory)
    return row


def _latest(connection: Connection, number: int, name: str, before: int | None = None, limit: int = 1) -> list[Block]:
    low, high = key_range(number)
    high = high if before is None else row_key(number, before) - 1
    rows = run_compiled(connection, _LATEST, {"m": number, "b": name, "low": low, "high": high, "k": limit})
    return [_decode_row(row) for row in rows]


def read_blocks(connection: Connection, names: Sequence[BlockName]) -> dict[BlockName, Block]:
    found: dict[BlockName, Block] = {}
    numbers: dict[MemoryName, int | None] = {}
    for name in names:
        if name.of not in numbers:
            row = run_compiled(connection, _MEMORY, {"ns": name.of.namespace, "n": name.of.memory}).one_or_none()
            numbers[name.of] = None if row is None else row.number
        number = numbers[name.of]
        if number is not None and (latest := _latest(connection, number, name.name)):
            found[name] = _with_states(connection, number, latest)[0]
    return found


def _with_states(connection: Connection, number: int, present: Sequence[Block]) -> list[Block]:
    if all(one.content.standing is None for one in present):
        return list(present)
    rows = connection.execute(_STATES, {"m": number})
    states = {row.name: StandingState(row.revision, row.rest_us, row.look_us, row.problem) for row in rows}
    if any(one.content.standing is not None and one.content.standing.question.scopes for one in present):
        for row in connection.execute(_ASKED, {"m": number}).all():
            asked = AskedMemory(MemoryName(row.namespace, row.name), row.uid, row.revision)
            states[row.block] = replace(states[row.block], asked=(*states[row.block].asked, asked))
    return [one if one.content.standing is None else replace(one, state=states.get(one.name)) for one in present]


def _find_due(connection: Connection, now_us: int, limit: int) -> DueBlocks:
    found = connection.execute(_DUE, {"now": now_us, "k": limit})
    next_us = connection.execute(_NEXT, {"now": now_us}).scalar_one()
    return DueBlocks(tuple((row.uid, row.name) for row in found), next_us)


def _get_block(connection: Connection, name: BlockName, version: int) -> Block:
    number = _find_memory(connection, name.of).number
    latest = _latest(connection, number, name.name, version + 1 if version else None)
    if not latest:
        _raise_missing(connection, number, name, version)
    if version and latest[0].version != version:
        _raise_missing(connection, number, name, version)
    return latest[0] if version else _with_states(connection, number, latest)[0]


def _raise_missing(connection: Connection, number: int, name: BlockName, version: int) -> NoReturn:
    if version and _latest(connection, number, name.name):
        raise NoBlock(f"version {version} of the block {name} is not kept", name)
    raise NoBlock(f"there is no block {name}", name)


def _list_blocks(connection: Connection, memory: MemoryName, after: str, limit: int) -> list[Block]:
    number = _find_memory(connection, memory).number
    keys = [row.key for row in connection.execute(_PRESENT, {"m": number, "after": after, "k": limit})]
    return _with_states(connection, number, [*map(_decode_row, connection.execute(_OF_KEYS, {"keys": keys}))])


def _list_versions(connection: Connection, name: BlockName, before: int | None, limit: int) -> list[Block]:
    number = _find_memory(connection, name.of).number
    found = _latest(connection, number, name.name, before, limit)
    if not found and before is None:
        _raise_missing(connection, number, name, 0)
    return found


def _read_versions(connection: Connection, memory: MemoryName) -> tuple[str, dict[str, int]]:
    row = _find_memory(connection, memory)
    present = connection.execute(_PRESENT, {"m": row.number, "after": "", "k": NO_LIMIT})
    return row.uid, {name: key_position(key) for name, key in present}


# ---- writes


def _write_block(connection: Connection, name: BlockName, decide: Decide, writing: Writing) -> Block:
    sources = _lock_sources(connection, writing.sources or {})
    memory = _find_memory(connection, name.of, lock=True)
    old = next(iter(_latest(connection, memory.number, name.name)), None)
    content = decide(old)
    for uid, contents in (writing.sources or {}).items():
        _check_sources(connection, sources[uid], contents)
    if old is not None and codec.encode_record(old) == codec.encode_record(replace(old, content=content)):
        return old  # compared as stored: True and 1 are equal values
    if old is None and connection.execute(_COUNT, {"m": memory.number}).scalar_one() >= writing.blocks_max:
        raise BlocksFull(f"the memory {name.of} has {writing.blocks_max} blocks, the most that are allowed")
    version = memory.block_version + 1
    created = writing.now_us if old is None else old.create_time_us
    block = Block(name.name, version, content, created, max(writing.now_us, created), writing.principal)
    connection.execute(_RAISE, {"m": memory.number, "v": version})
    _put_rows(connection, memory.number, [block])
    key = row_key(memory.number, version)
    made_of = [{"key": key, "source": number} for number in sources.values() if number != memory.number]
    if made_of:
        connection.execute(insert(block_sources), made_of)
    elif old is not None and writing.sources is None and content.standing is not None:  # the text may be the old one
        connection.execute(_COPY_SOURCES, {"new": key, "old": row_key(memory.number, old.version)})
    _prune_versions(connection, memory.number, name.name, writing.versions_max)
    if content.standing is not None or (old is not None and old.content.standing is not None):
        _begin_state(connection, memory.number, block, writing.state or StandingState())
    return block


def _lock_sources(connection: Connection, sources: Mapping[str, Mapping[str, str]]) -> dict[str, int]:
    """Numbers of these memories, before the block's own is locked: a commit that erases locks in this order. Raises
    SourcesChanged."""
    if not sources:
        return {}
    found = {row.uid: row.number for row in connection.execute(_SOURCES, {"uids": list(sources)})}
    if gone := len(sources) - len(found):
        raise SourcesChanged(f"{gone} of {len(sources)} memories are gone")
    return found


def _check_sources(connection: Connection, number: int, sources: Mapping[str, str]) -> None:
    """Raises SourcesChanged. The memory's row is locked, so that no commit erases one of them meanwhile."""
    left = dict(sources)
    for ids in split_ids(list(sources)):
        for row in connection.execute(_CONTENTS, {"m": number, "ids": ids}):
            if codec.decode_fragment(row.payload, 0, 0).content == left[row.id]:
                del left[row.id]
    if left:
        raise SourcesChanged(f"{len(left)} of {len(sources)} fragments have changed or are gone")


def _begin_state(connection: Connection, number: int, block: Block, state: StandingState) -> None:
    """The state of a block that keeps itself; of another one, none."""
    named = {"m": number, "b": block.name}
    connection.execute(_FORGET_STATE, named)
    connection.execute(_FORGET_ASKED, named)
    if block.content.standing is None:
        return
    connection.execute(insert(standing_blocks), {"memory": number, "name": block.name, **_state_values(state)})
    known = {one.memory: one for one in state.asked}
    each = [known.get(one.memory, AskedMemory(one.memory)) for one in block.content.standing.question.scopes]
    rows = [_asked_values(one) | {"memory": number, "block": block.name} for one in dict.fromkeys(each)]
    if rows:
        connection.execute(insert(standing_memories), rows)


def _set_state(connection: Connection, number: int, name: str, state: StandingState, version: int | None) -> None:
    values: dict[str, Any] = _state_values(state)
    values["revision"] = case((_states.revision > state.revision, _states.revision), else_=state.revision)
    # A block that was written since has another state in the place of this one, with a question that may be another.
    last = key_range(number)[1] if version is None else row_key(number, version)
    held = connection.execute(_SET_STATE.values(values), {"m": number, "b": name, "last": last}).rowcount
    for one in state.asked if held else ():
        asked = {"ns": one.memory.namespace, "n": one.memory.memory, "u": one.uid, "r": one.revision}
        connection.execute(_SET_ASKED, asked | {"m": number, "b": name})


def _asked_values(one: AskedMemory) -> dict[str, Any]:
    named = {"namespace": one.memory.namespace, "name": one.memory.memory}
    return named | {"uid": one.uid, "revision": one.revision}


def _state_values(state: StandingState) -> dict[str, Any]:
    return {"revision": state.revision, "rest_us": state.rest_us, "look_us": state.look_us, "problem": state.problem}


def erase_sources(connection: Connection, number: int, ids: Sequence[str]) -> None:
    """Erase the versions that were made of these fragments, also those of other memories; a present one is replaced by
    one without a text, which is due."""
    if ids:
        gone = set(ids)
        made = [*connection.execute(_MADE_OF, {"m": number}), *_read_made_of(connection, number)]
        _erase_versions(connection, {row.key for row in made if not gone.isdisjoint(row.sources.split(" "))})


def erase_made_of(connection: Connection, number: int) -> None:
    """As erase_sources, of a memory that is deleted: versions of others' blocks."""
    _erase_versions(connection, {row.key for row in _read_made_of(connection, number)})


def _read_made_of(connection: Connection, number: int) -> list[Any]:
    """Versions of others' blocks that are made of this memory's fragments. One statement for it scans on PostgreSQL."""
    keys = connection.execute(_OF_OTHERS, {"m": number}).scalars().all()
    return [row for some in split_ids(keys) for row in connection.execute(_SOURCES_OF, {"keys": some}) if row.sources]


def _erase_versions(connection: Connection, keys: Collection[int]) -> None:
    for key in sorted(keys):
        number = key >> POSITION_BITS
        last = connection.execute(_VERSION, {"m": number}).scalar_one_or_none()
        payload = connection.execute(_PAYLOAD, {"k": key}).scalar_one_or_none()
        if payload is None:
            continue  # another server has pruned it
        block = codec.decode_block(payload)
        present = _latest(connection, number, block.name)[0]
        _drop_versions(connection, [key])
        standing = block.content.standing
        if last is not None and present.version == block.version and standing is not None:
            connection.execute(_RAISE, {"m": number, "v": last + 1})
            nothing = replace(standing, citations=(), sources=(), memories=(), digest=b"")
            emptied = replace(block, version=last + 1, content=replace(block.content, text="", standing=nothing))
            _put_rows(connection, number, [emptied])
            _begin_state(connection, number, emptied, StandingState())


def _drop_versions(connection: Connection, keys: Sequence[int]) -> None:
    for statement in _ERASE:
        connection.execute(statement, {"keys": keys})


def _add_versions(connection: Connection, uid: str, versions: Sequence[Block], versions_max: int, last: int) -> None:
    memory = connection.execute(_BY_UID, {"u": uid}).one_or_none()
    if memory is None:
        raise StaleWrite(f"memory {uid} is gone")
    new = [one for one in versions if one.version > memory.block_version]
    latest = max(memory.block_version, last, *(one.version for one in new))
    connection.execute(_RAISE, {"m": memory.number, "v": latest})
    _put_rows(connection, memory.number, new)
    for name, last_one in sorted({one.name: one for one in new}.items()):
        _prune_versions(connection, memory.number, name, versions_max)
        _begin_state(connection, memory.number, last_one, StandingState())


def read_all(connection: Connection, number: int) -> tuple[Block, ...]:
    """All kept versions of a memory's blocks, in ascending order."""
    low, high = key_range(number)
    return tuple(map(_decode_row, connection.execute(_OF_MEMORY, {"low": low, "high": high})))


def _put_rows(connection: Connection, number: int, made: Sequence[Block]) -> None:
    rows = [
        {
            "key": row_key(number, one.version),
            "memory": number,
            "name": one.name,
            "payload": codec.encode_record(one),
            "sources": " ".join(one.content.standing.sources) or None if one.content.standing is not None else None,
        }
        for one in made
    ]
    if rows:
        connection.execute(insert(blocks), rows)


def _prune_versions(connection: Connection, number: int, name: str, kept: int) -> None:
    low, high = key_range(number)
    named = {"m": number, "b": name}
    over = _OVER.offset(kept).limit(1)
    last = connection.execute(over, named | {"low": low, "high": high}).scalar_one_or_none()
    if last is not None:
        _drop_versions(connection, connection.execute(_UP_TO, named | {"last": last}).scalars().all())


def _delete_block(connection: Connection, name: BlockName, version: int | None) -> bool:
    number = _find_memory(connection, name.of, lock=True).number
    if version is not None:
        present = next((one.version for one in _latest(connection, number, name.name)), 0)
        if present != version:
            raise BlockDiffers(f"the block {name} was written since", present)
    named = {"m": number, "b": name.name}
    for statement in (_FORGET_STATE, _FORGET_ASKED):
        connection.execute(statement, named)
    keys = connection.execute(_ALL, named).scalars().all()
    _drop_versions(connection, keys)
    return bool(keys)


def _decode_row(row: Row[Any]) -> Block:
    return codec.decode_block(row.payload)
