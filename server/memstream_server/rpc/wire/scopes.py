"""Converts the scopes of queries from messages, and answers of other servers back to values."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Any, TypeVar

from google.protobuf.timestamp_pb2 import Timestamp

from memstream.v1 import fragment_pb2
from memstream.v1 import stream_service_pb2 as pb
from memstream.v1.scope_pb2 import LabelSelector, RecallScope
from memstream_server.core.filters import Unmatched
from memstream_server.core.ranking import NearMiss, Stage
from memstream_server.core.scores import Scored
from memstream_server.core.suspicions import ConflictReason, Suspicion
from memstream_server.core.time_phrases.calendar import Window
from memstream_server.core.time_phrases.recognition import TimePhrase
from memstream_server.core.values import Fragment, FragmentKind, Structured, Tier, TruthStatus
from memstream_server.engine.requests import ChainLink, Query, RecallAnswer, Recollection, Scope
from memstream_server.ports.journal.records import Labels
from memstream_server.rpc import validation as check
from memstream_server.rpc.limits import RequestLimits
from memstream_server.rpc.validation import Violations
from memstream_server.rpc.wire import fragments, policies, queries, scalars
from memstream_server.rpc.wire.filters import read_filter

SCOPES_MAX = 100
_WEIGHT_MAX = 100
_PREFIX = re.compile(r"[A-Za-z0-9][A-Za-z0-9\-_.~]*(/([A-Za-z0-9][A-Za-z0-9\-_.~]*)?)?")


def named_memory(scope: RecallScope) -> tuple[str, str] | None:
    """(namespace, name) of a scope of one memory, as far as it has the right form."""
    namespace, slash, name = scope.memory.partition("/")
    return (namespace, name) if slash and namespace and name else None


def only_memory(query: pb.RecallQuery) -> tuple[str, str] | None:
    """(namespace, name) of the memory that the scopes of a query name; None if they do not name exactly one."""
    return named_memory(query.scopes[0]) if len(query.scopes) == 1 else None


def read_scopes(
    message: pb.RecallQuery, session: str, limits: RequestLimits, dimension: int, prefix: str = "query."
) -> tuple[Query, list[Scope]]:
    """What is asked of all together, and the scopes with what each of their memories is asked. Raises InvalidField."""
    found = Violations()
    alone = only_memory(message) is not None
    if len(message.scopes) > SCOPES_MAX:
        found.add(f"{prefix}scopes", f"has {len(message.scopes)} entries, at most {SCOPES_MAX} are allowed")
        found.check()
    _check_query(found, message, alone, prefix)
    read = [_read_scope(found, f"{prefix}scopes[{at}]", scope, limits) for at, scope in enumerate(message.scopes)]
    named = [each.memory for each in message.scopes if each.memory]
    for twice in dict.fromkeys(each for each in named if named.count(each) > 1):
        found.add(f"{prefix}scopes", f"names {check.quote_text(twice)} twice: a memory is asked once")
    found.check()
    base = pb.RecallQuery()
    base.CopyFrom(message)
    del base.scopes[:]
    base.partial = False
    whole = queries.read_query(base, session, limits, dimension, prefix)
    return whole, [
        _with_query(scope, base, given, whole, alone, (session, limits, dimension, prefix))
        for scope, given in zip(read, message.scopes, strict=True)
    ]


def _check_query(found: Violations, message: pb.RecallQuery, alone: bool, prefix: str) -> None:
    if message.min_revision and not alone:
        found.add(f"{prefix}min_revision", "is given with several memories: give each scope its own")
    if message.HasField("as_of_revision") and not alone:
        found.add(f"{prefix}as_of_revision", "is given with several memories, which have no common revision")
    for name in ("word_statistics", "count_words"):
        if getattr(message, name):
            found.add(f"{prefix}{name}", "is given with scopes")


def _read_scope(found: Violations, field: str, scope: RecallScope, limits: RequestLimits) -> Scope:
    """Without what its memories are asked."""
    if scope.HasField("weight") and not 0 < scope.weight <= _WEIGHT_MAX:  # also of NaN
        found.add(f"{field}.weight", f"must be greater than 0 and at most {_WEIGHT_MAX}, is {scope.weight}")
    if scope.HasField("limit"):
        check.check_bounds(found, f"{field}.limit", scope.limit, 1, limits.recall_limit_max)
    if scope.HasField("filter"):
        read_filter(found, scope.filter, limits, f"{field}.filter")
    if check.not_negative(found, f"{field}.min_revision", scope.min_revision) and not scope.memory:
        found.add(f"{field}.min_revision", "is given with several memories: name one")
    labels: Labels = ()
    if scope.WhichOneof("memories") == "labels":
        labels = _read_labels(found, f"{field}.labels", scope.labels, limits)
    return Scope(
        query=_NO_QUERY,
        message=b"",
        weight=scope.weight if scope.HasField("weight") else 1.0,
        memory=_read_memory(found, field, scope, limits),
        prefix=scope.prefix,
        namespace=scope.labels.namespace,
        labels=labels,
    )


def _read_memory(found: Violations, field: str, scope: RecallScope, limits: RequestLimits) -> tuple[str, str] | None:
    which = scope.WhichOneof("memories")
    if which is None:
        found.add(field, "names no memories: set memory, prefix or labels")
    elif which == "prefix":
        if not _PREFIX.fullmatch(scope.prefix) or len(scope.prefix) > 2 * limits.name_bytes_max + 1:
            found.add(f"{field}.prefix", f"is {check.quote_text(scope.prefix)}, which begins no namespace/memory")
    elif which == "memory":
        memory = named_memory(scope)
        if memory is None:
            found.add(f"{field}.memory", f'is {check.quote_text(scope.memory)}: it must be "namespace/memory"')
        else:
            for each in memory:
                check.check_name(found, f"{field}.memory", each, limits)
        return memory
    return None


def _read_labels(found: Violations, field: str, selector: LabelSelector, limits: RequestLimits) -> Labels:
    if selector.namespace:
        check.check_name(found, f"{field}.namespace", selector.namespace, limits)
    if not selector.labels:
        found.add(f"{field}.labels", "needs at least one label")
    return policies.read_labels(found, selector.labels, limits)


_NO_QUERY = Query("")
_Word = TypeVar("_Word", bound=StrEnum)


def _with_query(
    scope: Scope,
    base: pb.RecallQuery,
    given: RecallScope,
    whole: Query,
    alone: bool,
    reading: tuple[str, RequestLimits, int, str],
) -> Scope:
    """The scope with the query of each of its memories."""
    limits_more = given.HasField("limit") and not (base.HasField("limit") and base.limit <= given.limit)
    own = bool(limits_more or given.HasField("filter") or given.min_revision)
    if not own and (alone or not base.token_budget):
        return _make_scope(scope, whole, base)
    message = pb.RecallQuery()
    message.CopyFrom(base)
    if limits_more:
        message.limit = given.limit
    if given.HasField("filter"):
        both = [each for each in (base.filter, given.filter) if each.ByteSize()]
        message.filter.CopyFrom(both[0] if len(both) == 1 else fragment_pb2.FragmentFilter(all_of=both))
    if given.min_revision:
        message.min_revision = given.min_revision
    if not alone:
        message.token_budget = 0  # of all together
    return _make_scope(scope, queries.read_query(message, *reading), message)


def _make_scope(scope: Scope, query: Query, message: pb.RecallQuery) -> Scope:
    sent = message.SerializeToString(deterministic=True)
    return Scope(query, sent, scope.weight, scope.memory, scope.prefix, scope.namespace, scope.labels)


# ---- answers of other servers
def read_answer(response: pb.RecallOnceResponse) -> RecallAnswer:
    """The answer of another server."""
    parts, done = response.recollections, response.done
    formulas = [one.explanation.formula for one in parts.recollections if one.HasField("explanation")]
    return RecallAnswer(
        revision=done.revision,
        recollections=tuple(map(_read_recollection, parts.recollections)),
        working_ids=tuple(parts.working_memory_ids),
        working=tuple(map(_read_fragment, parts.working_memory)),
        eligible=done.eligible,
        considered=done.considered,
        best_relevance=done.best_relevance,
        degraded=done.degraded,
        near_misses=tuple(map(_read_near_miss, done.near_misses)),
        timings_s={},
        tokens=done.tokens,
        formula=formulas[0] if formulas else "",
        weak=done.weak,
        interpreted=tuple(map(_read_time_phrase, done.interpreted)),
        as_of_revision=done.as_of_revision,
        unmatched=tuple(Unmatched(each.field, each.value) for each in done.unmatched),
        receipt_id=done.receipt_id,
    )


def _read_recollection(message: pb.Recollection) -> Recollection:
    parts = message.explanation.parts
    cosines = [part.details["cosine"] for part in parts if "cosine" in part.details]
    scored = Scored(
        slot=-1,
        id=message.fragment.id,
        score=message.score,
        relevance=message.relevance,
        cosine=cosines[0] if cosines else None,
        names=tuple(part.name for part in parts),
        values=tuple(part.value for part in parts),
        weights=tuple(part.weight for part in parts),
    )
    return Recollection(
        fragment=_read_fragment(message.fragment),
        scored=scored,
        truncated=message.truncated,
        folded=tuple(message.folded_ids),
        status=_read_status(message.status),
        chain=tuple(
            ChainLink(link.fragment_id, _time_us(link.observe_time), _read_status(link.status))
            for link in message.chain
        ),
        suspicions=tuple(
            Suspicion(
                each.newer_id,
                each.older_id,
                _read_word(ConflictReason, each.reason, ConflictReason.OTHER),
                _time_us(each.create_time),
            )
            for each in message.suspicions
        ),
        later_id=message.later_id,
        companion=_read_recollection(message.companion) if message.HasField("companion") else None,
    )


def _read_fragment(message: fragment_pb2.Fragment) -> Fragment:
    unchecked = Violations()
    structured = None
    if message.WhichOneof("body") == "structured":
        given = message.structured
        structured = Structured(**{field.name: value for field, value in given.ListFields()})
    times: dict[str, Any] = {
        f"{name}_us": _time_us(getattr(message, name))
        for name in fragments.TIMES
        if message.HasField(name)  # type: ignore[arg-type]
    }
    repeat_us = times.pop("last_observe_time_us", 0)
    return Fragment(
        id=message.id,
        content=message.content if structured is None else structured.text(),
        tier=fragments.TIERS.read_value(unchecked, "tier", message.tier, Tier.LONG_TERM),
        kind=fragments.KINDS.read_value(unchecked, "kind", message.kind, FragmentKind.OBSERVATION),
        structured=structured,
        speaker=message.speaker,
        role=next(iter(fragments.ROLES.read_all(unchecked, "role", [message.role])), None),
        session=message.session,
        importance=message.importance,
        access_count=message.access_count,
        enhancement_count=message.enhancement_count,
        duplicate_count=message.duplicate_count,
        sources=tuple(message.sources),
        metadata=scalars.metadata_of(message.metadata),
        pinned=message.pinned,
        external_id=message.external_id,
        token_count=message.token_count,
        model=message.model,
        repeat_time_us=repeat_us,
        version=_read_version(message.etag),
        superseded_by=message.superseded_by,
        supersedes=tuple(message.supersedes),
        **times,
    )


def _read_word(kind: type[_Word], text: str, other: _Word) -> _Word:
    """The value that a text names; `other` for one that only a newer server has."""
    return kind(text) if text in kind.__members__.values() else other


def _read_version(etag: str) -> int:
    """The version in an etag; 0 in a form that this version does not know."""
    try:
        return int(etag.partition("-")[2], 16)
    except ValueError:
        return 0


def _read_status(number: int) -> TruthStatus:
    return fragments.STATUSES.read_value(Violations(), "status", number, TruthStatus.CURRENT)


def _read_near_miss(message: pb.NearMiss) -> NearMiss:
    scored = Scored(-1, message.fragment_id, message.score, message.relevance, None, (), (), ())
    return NearMiss(scored, _read_word(Stage, message.stage, Stage.OTHER), message.superseded_by)


def _read_time_phrase(message: pb.InterpretedTime) -> TimePhrase:
    begin: Any = getattr(message, "from")  # a keyword of Python
    start_us = _time_us(begin) if message.HasField("from") else None
    return TimePhrase(message.phrase, 0, 0, Window(start_us, _time_us(message.to) if message.HasField("to") else None))


def _time_us(message: Timestamp) -> int:
    return message.seconds * 1_000_000 + message.nanos // 1_000
