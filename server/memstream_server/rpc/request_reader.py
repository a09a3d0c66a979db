"""Reads the messages of calls and bounds their size and number of fields before it parses them.

Rule 1. The server reads no message before it has authenticated the caller: unread data stay in the HTTP/2 window.
Rule 2. The bytes that one caller has in RAM are bounded. A message that is being received counts as the largest allowed
message; a received one counts as its bytes until the call ends or the stream reads the next. Further reads of that
caller wait, in order.
Streams are the exception, for most of them wait for a message without any byte of it. Once one caller has so many that
unfinished messages could exceed the bound, the server compares what arrived with what it has read (`UnreadBytes`), and
ends the caller's waiting streams if the difference exceeds it.
Rule 3. gRPC does not decompress, because it would do so before authentication. A gzip member begins with bytes that no
message begins with (a field of wire type 7); this module decompresses it, up to the limit of its rpc.
Rule 4. Slow checks before parsing run for one message of a caller at a time, and with pauses.
Rule 5. The message of a call with one request must arrive within `opening_max_s`, like the first message of a stream.
Among calls without identification, those that have waited longest for their message are ended first.
"""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Callable, Generator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc.aio
from google.protobuf import descriptor_pool
from google.protobuf.message import DecodeError, Message

from memstream_server.core.printable import number_text
from memstream_server.engine.errors import InvalidField, ProtocolViolation, QuotaExceeded
from memstream_server.engine.runtime.call_context import REQUEST, Request
from memstream_server.engine.runtime.threads import run_in_thread
from memstream_server.rpc.connections import UnreadBytes
from memstream_server.rpc.rpc_table import RPC_RULES
from memstream_server.rpc.wire.scan import Table, exceeds_fields, may_exceed, merge_in_slices, sub_messages

if TYPE_CHECKING:
    from memstream_server.rpc.limits import RequestLimits

COMPRESSION_ALGORITHMS = 1 << 0 | 1 << 2
"""gRPC core's numbers of no compression and gzip."""
GZIP = b"\x1f\x8b"
ANYBODY = ""
"""The account of calls without identification."""
ANYBODY_READS_MAX = 16
"""Messages of such calls that the server receives at once, and those that began within ANYBODY_WAIT_S."""
ANYBODY_WAIT_S = 1.0
"""A message that has arrived waits for turns of other calls before the server reads it."""
_SMALL_FIELDS = 8
"""Divides the maximum number of fields for rpcs with small messages."""
_GZIP_WINDOW_BITS = 31
PARSED_AT_ONCE = 4_096
"""Bytes that are parsed without a pause: one millisecond if they are nothing but empty messages."""
_NO_MESSAGE = "the bytes sent are not a message of this rpc's type"
_INFLATED_AT_ONCE = 65_536
"""Bytes that are decompressed on the event loop; a thread decompresses the rest."""
_LOOK_S = 0.1
"""Between two looks at what connections hold: a burst of 320 MB on loopback arrives within a second."""
_PAUSE_S = 0.001
"""Pause between two steps of a scan, so that it takes at most a third of the event loop."""
_CANCELLED_S = 0.05
"""How long after the end of its messages a call may learn that it was cancelled."""
_Context = grpc.aio.ServicerContext[Any, Any]
Decode = Callable[[bytes], Message]


@dataclass(slots=True)
class _Account:
    used: int = 0
    waiting: deque[tuple[int, asyncio.Future[None]]] = field(default_factory=deque)


class ByteBudget:
    """Bytes that each holder may have at once; further requests wait, in order. A holder with nothing gets any size."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self._accounts: dict[str, _Account] = {}

    def try_take(self, holder: str, size: int) -> bool:
        """Takes `size` bytes if the holder may have them now, without an await; `give` returns them."""
        account = self._accounts.get(holder)
        if account is None:
            account = self._accounts[holder] = _Account()
        if account.waiting or (account.used and account.used + size > self.bytes_max):
            return False
        account.used += size
        return True

    async def take_bytes(self, holder: str, size: int) -> None:
        """Waits until the holder may have `size` bytes more; `give` returns them."""
        if self.try_take(holder, size):
            return
        account = self._accounts[holder]
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        account.waiting.append((size, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it was granted in the same moment
                self.give_back(holder, size)
            raise

    def give_back(self, holder: str, size: int) -> None:
        """The holder has `size` bytes less."""
        account = self._accounts[holder]
        account.used -= size
        while account.waiting:
            size, turn = account.waiting[0]
            if not turn.done():
                if account.used and account.used + size > self.bytes_max:
                    return
                account.used += size
                turn.set_result(None)
            account.waiting.popleft()
        if not account.used:
            del self._accounts[holder]

    def used_by(self, holder: str) -> int:
        """Bytes that the holder has."""
        account = self._accounts.get(holder)
        return 0 if account is None else account.used


@dataclass(frozen=True, slots=True)
class _Rpc:
    """Bounds of an rpc's messages."""

    bytes_max: int
    fields_max: int
    table: Table


class RequestReader:
    """Reads the requests of one server."""

    def __init__(self, limits: RequestLimits) -> None:
        self.opening_max_s = limits.opening_max_s
        self._fields_max = limits.message_fields_max
        self.message_bytes_max = limits.message_bytes_max
        self.received_bytes_max = limits.received_bytes_max
        self.budget = ByteBudget(limits.caller_request_bytes_max)
        self._safe_streams = self.budget.bytes_max // self.received_bytes_max
        """So many streams of a caller cannot exceed the budget in unfinished messages."""
        self._examined = ByteBudget(0)  # one message of each caller
        self._small = (
            min(limits.small_message_bytes_max, limits.message_bytes_max),
            limits.message_fields_max // _SMALL_FIELDS,
        )
        self._rpcs: dict[str, _Rpc] = {}
        self._anybody: dict[int, tuple[asyncio.Timeout, float]] = {}
        """Reads of calls without identification, with the time at which each began."""
        self._read = 0
        self.waiting: dict[Requests, asyncio.Task[Any]] = {}
        """Streams that wait for a message."""
        self._waiting_of: Counter[str] = Counter()
        self.unread: UnreadBytes | None = None
        self._counting = asyncio.Event()
        """Set when `unread` begins to count."""

    async def watch_streams(self, port: int) -> None:
        """Ends streams that hold too much in unfinished messages; until it is cancelled."""
        self.unread = unread = UnreadBytes(port)
        while True:
            if not unread.counts:
                self._counting.clear()
                await self._counting.wait()
            await asyncio.sleep(_LOOK_S)
            many = [holder for holder, count in self._waiting_of.items() if count > self._safe_streams]
            if many:
                await asyncio.to_thread(unread.look)
            else:
                unread.end()
            for holder in many:
                self._end_excess(holder, unread)

    def _end_excess(self, holder: str, unread: UnreadBytes) -> None:
        of_peer: dict[str, Counter[str]] = defaultdict(Counter)
        for requests in self.waiting:
            of_peer[requests.peer][requests.holder] += 1
        peers = {peer for peer, holders in of_peer.items() if holders.most_common(1)[0][0] == holder}
        if unread.of_peers(peers) <= self.budget.bytes_max + self.budget.used_by(holder):
            return
        for requests, task in list(self.waiting.items()):
            if requests.holder == holder and requests.peer in peers:
                requests.evicted = True
                task.cancel()
        unread.end()

    def begin_wait(self, requests: Requests) -> None:
        """A stream waits for its next message."""
        task = asyncio.current_task()
        assert task is not None
        self.waiting[requests] = task
        self._waiting_of[requests.holder] += 1
        if self._waiting_of[requests.holder] > self._safe_streams and self.unread and not self.unread.counts:
            self.unread.begin()
            self._counting.set()

    def end_wait(self, requests: Requests) -> None:
        """It waits no longer."""
        del self.waiting[requests]
        self._waiting_of[requests.holder] -= 1
        if not self._waiting_of[requests.holder]:
            del self._waiting_of[requests.holder]

    @contextlib.asynccontextmanager
    async def examine_alone(self, holder: str) -> AsyncIterator[None]:
        """Waits until no other message of the caller is being examined."""
        await self._examined.take_bytes(holder, 1)
        try:
            yield
        finally:
            self._examined.give_back(holder, 1)

    def count_message(self, context: _Context, size: int) -> None:
        """A message has been read."""
        if self.unread is not None and self.unread.counts:
            self.unread.add_message(context.peer(), size)

    def find_rpc(self, path: str) -> _Rpc:
        """The bounds of a method that the server has."""
        found = self._rpcs.get(path)
        if found is None:
            service, _, name = path[1:].rpartition("/")
            method = descriptor_pool.Default().FindMethodByName(f"{service}.{name}")
            table = sub_messages(method.input_type)
            rule = RPC_RULES.get(path)
            large = rule is not None and rule.large_messages
            bytes_max, fields_max = (self.message_bytes_max, self._fields_max) if large else self._small
            if rule is not None and rule.with_bodies:
                bytes_max += self._small[0]
            found = self._rpcs[path] = _Rpc(bytes_max, fields_max, table)
        return found

    async def read_only_message(self, holder: str, context: _Context) -> Any:
        """The bytes of a call's only message. Raises TimeoutError if it does not arrive in time."""
        async with asyncio.timeout(self.opening_max_s) as timeout:
            if holder:
                return await context.read()
            self._read += 1
            number, now_s = self._read, asyncio.get_running_loop().time()
            self._anybody[number] = timeout, now_s
            try:
                if len(self._anybody) > ANYBODY_READS_MAX:
                    oldest = min(self._anybody)
                    given, began_s = self._anybody[oldest]
                    if now_s - began_s >= ANYBODY_WAIT_S:
                        del self._anybody[oldest]
                        if not given.expired():
                            given.reschedule(0.0)
                return await context.read()
            finally:
                self._anybody.pop(number, None)


class Requests:
    """The messages of one call: an async iterator for a stream, `only` for a call with one message."""

    def __init__(self, reader: RequestReader, path: str, decode: Decode, check: Callable[[Message], None]) -> None:
        """`check` gets the first message, and may raise."""
        self._reader = reader
        self._rpc = reader.find_rpc(path)
        self._at_once_max = min(PARSED_AT_ONCE, self._rpc.bytes_max)
        self._decode = decode
        self._check: Callable[[Message], None] | None = check
        self._context: Any = None
        self._peer = ""
        self.evicted = False
        """Whether the stream ends because its caller holds too much in unfinished messages."""
        self.holder = ANYBODY
        """Whose account the messages are charged to."""
        self._held = 0

    def read_from(self, context: _Context) -> Requests:
        """Sets the context to read bytes from: the method has no deserializer."""
        self._context = context
        return self

    @property
    def peer(self) -> str:
        """The client's address in gRPC's form."""
        self._peer = self._peer or self._context.peer()
        return self._peer

    def hold_for(self, holder: str) -> None:
        """Sets whose account further messages are charged to."""
        if not self._held:
            self.holder = holder

    def close(self) -> None:
        """The call has ended."""
        self._give_back(self._held)

    async def read_only_message(self) -> Message:
        """Raises InvalidField, ProtocolViolation, QuotaExceeded."""
        prepaid = getattr(self._context, "prepaid", False)  # of a call by HTTP
        if self.holder and not prepaid and not self._try_take_bytes(self._reader.received_bytes_max):
            await self._take_bytes(self._reader.received_bytes_max)
        try:
            data = await self._reader.read_only_message(self.holder, self._context)
        except TimeoutError:
            raise self._overdue_error() from None
        if data is grpc.aio.EOF:
            await asyncio.sleep(_CANCELLED_S)  # raises if the client has cancelled, which also ends the messages
            raise ProtocolViolation("the call has no message")
        self._reader.count_message(self._context, len(data))
        if self._held:
            self._give_back(max(0, self._held - len(data)))
        message = self._parse_small(data)
        if message is None:
            message = await self._parse_message(data)
        del data  # the frames of an error raised below would keep it until the garbage collector runs
        return self._check_message(message)

    def __aiter__(self) -> Requests:
        return self

    async def __anext__(self) -> Message:
        if self._held:  # the handler asks for the next message when it has finished the one before
            self._give_back(self._held)
        data = await self._read_next()
        if data is grpc.aio.EOF:
            raise StopAsyncIteration
        REQUEST.set(Request())  # each message counts by its own cost: a stream may live for days
        self._reader.count_message(self._context, len(data))
        if self.holder and not self._try_take_bytes(len(data)):
            await self._take_bytes(len(data))
        message = self._parse_small(data)
        if message is None:
            message = await self._parse_message(data)
        del data  # a message of megabytes would be held twice while the handler works on it
        return self._check_message(message)

    async def _read_next(self) -> Any:
        self._reader.begin_wait(self)
        try:
            return await (self._read_first() if self._check is not None else self._context.read())
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self.evicted or task is None:
                raise
            task.uncancel()  # `_end_excess` means this wait, not the handler, which continues with the error
            limit = self._reader.budget.bytes_max
            raise QuotaExceeded(
                f"your streams hold more than {limit} bytes of messages that you have not finished",
                quota="caller_request_bytes_max",
                limit=limit,
            ) from None
        finally:
            self._reader.end_wait(self)

    async def _read_first(self) -> Any:
        """The first message, which must arrive in time."""
        try:
            async with asyncio.timeout(self._reader.opening_max_s):
                return await self._context.read()
        except TimeoutError:
            raise self._overdue_error() from None

    def _overdue_error(self) -> Exception:
        if self.holder == ANYBODY:
            return QuotaExceeded(
                "the call's message did not come in time", quota="anybody_reads", limit=ANYBODY_READS_MAX
            )
        what = "the stream's first message" if self._check is not None else "the call's message"
        return ProtocolViolation(f"{what} did not come within {number_text(self._reader.opening_max_s)} s")

    def _parse_small(self, data: bytes) -> Message | str | None:
        """As `_parse_message`, for data that need no await: small and not compressed; else None."""
        if data[:2] == GZIP or len(data) > self._at_once_max:
            return None
        try:
            return self._decode(data)
        except DecodeError:
            return _NO_MESSAGE

    async def _parse_message(self, data: bytes) -> Message | str:
        """The message, or the reason why the data are not one."""
        rpc = self._rpc
        if data[:2] == GZIP:
            async with self._reader.examine_alone(self.holder):
                unzipped = await decompress(data, rpc.bytes_max)
            if isinstance(unzipped, str):
                return unzipped
            data = unzipped
        if len(data) > rpc.bytes_max:
            return f"the message has {len(data)} bytes, this rpc takes at most {rpc.bytes_max}"
        if may_exceed(data, rpc.fields_max):
            async with self._reader.examine_alone(self.holder):
                if await _run_scan(exceeds_fields(data, rpc.table, rpc.fields_max)):
                    return f"the message has more than {rpc.fields_max} fields"
        try:
            return await merge_in_slices(self._decode(b""), data)
        except DecodeError:
            return _NO_MESSAGE

    def _check_message(self, message: Message | str) -> Message:
        if isinstance(message, str):
            raise InvalidField(message)
        check, self._check = self._check, None
        if check is not None:
            check(message)
        return message

    def _try_take_bytes(self, size: int) -> bool:
        taken = self._reader.budget.try_take(self.holder, size)
        if taken:
            self._held += size
        return taken

    async def _take_bytes(self, size: int) -> None:
        await self._reader.budget.take_bytes(self.holder, size)
        self._held += size

    def _give_back(self, size: int) -> None:
        if size:
            self._held -= size
            self._reader.budget.give_back(self.holder, size)


async def _run_scan(scan: Generator[None, None, bool]) -> bool:
    """The result of the scan."""
    while True:
        try:
            next(scan)
        except StopIteration as ended:
            return bool(ended.value)
        await asyncio.sleep(_PAUSE_S)


async def decompress(data: bytes, bytes_max: int) -> bytes | str:
    """The decompressed data, or the reason why they cannot be decompressed."""
    member = zlib.decompressobj(_GZIP_WINDOW_BITS)
    try:
        found = member.decompress(data, min(bytes_max + 1, _INFLATED_AT_ONCE))
        if member.unconsumed_tail and len(found) <= bytes_max:
            rest = bytes_max + 1 - len(found)
            found += await run_in_thread(partial(member.decompress, member.unconsumed_tail, rest))
    except zlib.error:
        return "the message is not in order: its gzip data cannot be decompressed"
    if len(found) > bytes_max:
        return f"the message has more than {bytes_max} bytes once it is decompressed"
    if not member.eof or member.unused_data:
        return "the message is not in order: its gzip data are cut, or more follows them"
    return found
