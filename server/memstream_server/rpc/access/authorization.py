"""Authenticates the caller before every handler, and checks that the policy grants what the call requires.

Rule 1. No handler runs before the policy grants what the first message requires. Later messages of a stream cannot name
another memory. Authentication uses the headers alone: messages of other callers are not read.
Rule 2. A stream is rechecked when a message passes in either direction and RECHECK_S have passed: a revoked key, an
expired token or a changed policy ends it.
Rule 3. An operation in a namespace where the caller has no right does not exist for that caller.
Rule 4. Of a header of another server, a token, a header of a proxy and a client certificate, the first that is present
decides. If it is invalid the call is refused: the next one is not tried.
Rule 5. A caller over its rate is slowed down on streams, by delayed reads; calls with one response are refused.
"""

from __future__ import annotations

import asyncio
import re
import time
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc.aio
import structlog

from memstream_server.engine.errors import MemoryNotFound, OperationNotFound, ProtocolViolation
from memstream_server.engine.runtime.call_context import ACCOUNT, PRINCIPAL, REQUEST, Request
from memstream_server.rpc.access.admission import Admission
from memstream_server.rpc.access.caller import CALLER, Caller, Verb
from memstream_server.rpc.access.files import Watched
from memstream_server.rpc.access.keys import PREFIX, ApiKey, name_of
from memstream_server.rpc.access.peers import CALLER_HEADER, PROXY_HEADER, Peers, TrustedProxies, forwarded_uri
from memstream_server.rpc.access.policy import AccessPolicy
from memstream_server.rpc.errors import PermissionDenied, Unauthenticated
from memstream_server.rpc.rpc_table import RPC_RULES, VERB_OF_OPERATION, Need, RpcRule, find_memory_name, find_namespace

if TYPE_CHECKING:
    from memstream_server.ports.journal.records import Labels, MemoryRecord
    from memstream_server.ports.operations import Operation
    from memstream_server.rpc.access.tokens import JwtIdentities
    from memstream_server.rpc.request_reader import Requests

Metadata = Sequence[tuple[str, str | bytes]]
_Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class Identities:
    """The accepted credentials; None or empty if one was not configured."""

    keys: Watched[Mapping[str, ApiKey]] | None = None
    tokens: JwtIdentities | None = None
    proxies: TrustedProxies = field(default_factory=lambda: TrustedProxies(""))
    peers: Peers = field(default_factory=Peers)

    async def identify_principal(self, metadata: Metadata, context: _Context, path: str) -> str:
        """Raises Unauthenticated."""
        if said := _metadata_values(metadata, CALLER_HEADER):
            return self.peers.verify_principal(_single_value(CALLER_HEADER, said), path)
        if said := _metadata_values(metadata, "authorization"):
            return await self._verify_bearer(_single_value("authorization", said))
        if (said := _metadata_values(metadata, PROXY_HEADER)) and context.peer() in self.proxies:
            return f"uri:{forwarded_uri(','.join(said))}"
        uris = [*context.auth_context().get("peer_uri", ())]
        if len(uris) == 1:
            return f"uri:{uris[0].decode(errors='replace')}"
        raise Unauthenticated("say who calls: a bearer token in `authorization`, or a client certificate with one URI")

    async def _verify_bearer(self, given: str) -> str:
        scheme, _, token = given.strip().partition(" ")
        token = token.strip()
        if scheme.lower() != "bearer" or not token:
            raise Unauthenticated("`authorization` must be: Bearer TOKEN")
        if token.startswith(PREFIX):
            name = name_of(self.keys.read_current(), token) if self.keys is not None else None
            if name is None:
                raise Unauthenticated("there is no such API key, or it was revoked")
            return f"key:{name}"
        if self.tokens is None:
            raise Unauthenticated("the bearer token is none that this server accepts")
        return f"jwt:{await self.tokens.verify_subject(token)}"


def _metadata_values(metadata: Metadata, key: str) -> list[str]:
    return [value for name, value in metadata if name == key and isinstance(value, str)]


def _single_value(key: str, values: Sequence[str]) -> str:
    if len(values) != 1:
        raise Unauthenticated(f"`{key}` was given more than once")
    return values[0]


log = structlog.get_logger(__name__)

RECHECK_S = 2.0
_OPERATION_ID = re.compile(r"[0-9A-Za-z]{1,64}")
RecordOf = Callable[[str, str], Awaitable["MemoryRecord"]]
OperationOf = Callable[[str], Awaitable["Operation"]]


class Authorization:
    """Authenticates and authorizes the calls of a server."""

    def __init__(
        self,
        identities: Identities,
        policy: Watched[AccessPolicy],
        operation_of: OperationOf,
        record_of: RecordOf,
        admission: Admission,
    ) -> None:
        """`operation_of` raises OperationNotFound, `record_of` MemoryNotFound."""
        self.record_of = record_of
        self.admission = admission
        self.identities = identities
        self.policy = policy
        self.operation_of = operation_of

    async def identify_holder(self, path: str, context: Any) -> str:
        """The principal that the bytes of a request are charged to. Raises Unauthenticated."""
        return await self.identities.identify_principal(context.invocation_metadata(), context, path)

    async def rights_of(self, path: str, context: Any, namespace: str) -> tuple[str, list[Verb]]:
        """The principal and its rights in the namespace; empty is the whole server. Raises Unauthenticated."""
        principal = await self.identify_holder(path, context)
        policy = self.policy.read_current()
        return principal, [verb for verb in Verb if policy.may(principal, verb, namespace)]

    def begin_call(self, path: str, metadata: Metadata) -> UnidentifiedCall | AuthorizedCall:
        """The access of one call."""
        rule = RPC_RULES.get(path)
        if rule is not None and rule.public:
            return UnidentifiedCall(self.admission, path)
        return AuthorizedCall(self, path, rule, metadata)


class OpenAccess:
    """Replaces Authorization if the server has no authentication."""

    def __init__(self) -> None:
        self.admission = Admission()

    async def identify_holder(self, _path: str, context: Any) -> str:
        """The connection that the bytes of a request are charged to."""
        peer: str = context.peer()
        return peer

    async def rights_of(self, _path: str, _context: Any, _namespace: str) -> tuple[str, list[Verb]]:
        """No principal, and every right."""
        return "", list(Verb)

    def begin_call(self, path: str, _metadata: Metadata) -> UnidentifiedCall:
        """The access of one call."""
        return UnidentifiedCall(self.admission, path)


class UnidentifiedCall:
    """A call that needs no identity.

    Each connection has an account for its requests. Health checks are on a shared account, in which the calls that have
    waited longest for their message give way.
    """

    def __init__(self, admission: Admission, path: str) -> None:
        self._admission = admission
        self._on_account = path.startswith("/memstream.")
        self._peer = ""

    async def identify_caller(self, requests: Requests, context: _Context) -> None:
        """Identifies the connection."""
        self._peer = context.peer()
        ACCOUNT.set((self._peer, ""))
        REQUEST.set(Request())
        if self._on_account:
            requests.hold_for(self._peer)

    def count_open(self, what: str) -> AbstractContextManager[None]:
        """Counts public streams only. Raises QuotaExceeded."""
        if self._on_account or what != "streams":
            return nullcontext()
        return self._admission.open_stream(self._peer)

    def count_client(self, context: _Context, what: str) -> AbstractContextManager[None]:
        """Counts the call among those of its client; health checks are nobody's."""
        return self._admission.clients.count_call("", context, what) if self._on_account else nullcontext()

    async def read_request(self, requests: Requests, _context: _Context, many: bool) -> Any:
        """The handler's input."""
        return requests if many else await requests.read_only_message()

    async def recheck(self, _context: _Context) -> None:
        """Does nothing: there is no identity that could change."""

    def end(self) -> None:
        """Does nothing."""


class AuthorizedCall:
    """One call with an identity."""

    def __init__(self, authorization: Authorization, path: str, rule: RpcRule | None, metadata: Metadata) -> None:
        self._authorization = authorization
        self._path = path
        self._rule = rule
        self._metadata = metadata
        self._principal = ""
        """Not the Caller: it refers to this call, and a cycle would outlive the call."""
        self._first: Any = None
        self._context: _Context | None = None
        self._checked_s = 0.0

    async def identify_caller(self, requests: Requests, context: _Context) -> None:
        """Uses the headers alone. Raises Unauthenticated, PermissionDenied."""
        await self._identify_caller(context)
        if self._rule is None:
            raise PermissionDenied(f"{self._path} is not in the server's table of rights")
        requests.hold_for(self._principal)

    def count_open(self, what: str) -> AbstractContextManager[None]:
        """Counts the call or stream of its caller. Raises QuotaExceeded."""
        return self._authorization.admission.count_open(self._principal, what)

    def count_client(self, context: _Context, what: str) -> AbstractContextManager[None]:
        """Counts the call among those of its client."""
        return self._authorization.admission.clients.count_call(self._principal, context, what)

    async def read_request(self, requests: Requests, context: _Context, many: bool) -> Any:
        """The handler's input. Raises PermissionDenied, OperationNotFound, QuotaExceeded."""
        if many:
            return _AuthorizedRequests(self, requests, context)
        request = await requests.read_only_message()
        await self.authorize(request)
        self._authorization.admission.charge_call(self._principal, request)
        return request

    async def _identify_caller(self, context: _Context) -> None:
        principal = await self._authorization.identities.identify_principal(self._metadata, context, self._path)
        if self._principal not in ("", principal):
            raise PermissionDenied("the credentials of the stream are now somebody else's")
        self._principal = principal
        self._checked_s = time.monotonic()
        self._context = context
        # Timers of the call copy the context variables, and the event loop keeps a cancelled timer for a while: the
        # Caller must not keep the call.
        policy, this = self._authorization.policy, weakref.ref(self)
        CALLER.set(
            Caller(
                principal,
                lambda verb, namespace, labels: policy.read_current().may(principal, verb, namespace, labels),
                lambda: _recheck_and_charge(this()),
            )
        )
        PRINCIPAL.set(principal)
        account = ACCOUNT.get()
        if account is None or account[0] != principal:
            ACCOUNT.set((principal, ""))
            REQUEST.set(Request())

    def end(self) -> None:
        """The call has ended."""
        self._context = self._first = None

    async def authorize(self, request: Any) -> None:
        """Checks that the caller may do what the first message asks for."""
        assert self._rule is not None  # identify_caller has checked it
        self._first = request
        for need in self._rule.needs:
            namespace = find_namespace(request, need)
            if (namespace or not need.optional) and not self._may(need.verb, namespace):
                await self._require_by_label(need, namespace, request)
        if self._rule.operation is not None:
            await self._check_operation(request.id, self._rule.operation)

    async def recheck(self, context: _Context) -> None:
        """Authenticates and authorizes again if the last check is old."""
        if time.monotonic() - self._checked_s < RECHECK_S:
            return
        self._checked_s = time.monotonic()
        if not any(key == CALLER_HEADER for key, _ in self._metadata):  # else the forwarding server rechecks
            await self._identify_caller(context)
        if self._first is not None:
            await self.authorize(self._first)

    async def recheck_and_charge(self) -> None:
        """Checks and charges as for another request of the stream."""
        if self._context is not None:
            await self.recheck(self._context)
            await self.charge(self._first, first=True)

    async def charge(self, message: Any, *, first: bool) -> None:
        """Counts a message of a stream, and waits until the caller's rate allows it."""
        owed_s = self._authorization.admission.charge_message(self._principal, message, first=first)
        if owed_s:
            await asyncio.sleep(owed_s)

    # ---- policy
    def _may(self, verb: Verb, namespace: str) -> bool:
        return self._authorization.policy.read_current().may(self._principal, verb, namespace)

    def _require_verb(self, verb: Verb, namespace: str) -> None:
        if self._may(verb, namespace):
            return
        log.info("permission_denied", principal=self._principal, verb=verb.value, namespace=namespace[:128])
        where = f"in the namespace {namespace[:128]!a}" if namespace else "for the whole server (no namespace is named)"
        raise PermissionDenied(f"{self._principal[:200]!a} does not have the right {verb.value} {where}")

    async def _require_by_label(self, need: Need, namespace: str, request: Any) -> None:
        """Raises PermissionDenied unless the labels of the memory that the request names give the right."""
        policy, name = self._authorization.policy.read_current(), find_memory_name(request, need)
        if name and policy.may(self._principal, need.verb, namespace, None):
            labels: Labels = ()
            with suppress(MemoryNotFound):  # refused as one without the labels
                labels = (await self._authorization.record_of(namespace, name)).labels
            if policy.may(self._principal, need.verb, namespace, labels):
                return
        self._require_verb(need.verb, namespace)

    async def _check_operation(self, id: str, verb: Verb) -> None:
        missing = OperationNotFound(f"there is no operation {id[:64]!r}; it may have ended over 7 days ago", id=id[:64])
        if not _OPERATION_ID.fullmatch(id):
            raise missing
        try:
            operation = await self._authorization.operation_of(id)
        except OperationNotFound:
            raise missing from None
        needed = VERB_OF_OPERATION.get(operation.type, Verb.ADMIN)
        if not self._may(Verb.READ, operation.namespace) and not self._may(needed, operation.namespace):
            raise missing
        if verb is not Verb.READ:
            self._require_verb(needed, operation.namespace)


async def _recheck_and_charge(call: AuthorizedCall | None) -> None:
    if call is not None:
        await call.recheck_and_charge()


class _AuthorizedRequests:
    """A request stream: the first message is authorized, later ones cannot open another memory."""

    def __init__(self, call: AuthorizedCall, requests: Any, context: _Context) -> None:
        self._call = call
        self._requests = requests
        self._context = context
        self._begun = False

    def __aiter__(self) -> _AuthorizedRequests:
        return self

    async def __anext__(self) -> Any:
        request = await anext(self._requests)
        if not self._begun:
            await self._call.authorize(request)
            self._begun = True
            await self._call.charge(request, first=True)
            return request
        await self._call.recheck(self._context)
        await self._call.charge(request, first=False)
        if "open" in request.DESCRIPTOR.fields_by_name and request.HasField("open"):
            raise ProtocolViolation("a stream is opened once, for one memory")
        return request
