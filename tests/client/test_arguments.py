"""Invalid arguments: each error names the argument, the value received and the values allowed, once."""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.rpc.error_details_pb2 import BadRequest
from hypothesis import given
from hypothesis import strategies as st

import memstream
import memstream.agent
import memstream.sync
from memstream.status import error_from_status
from memstream.templates import render_template
from tests.support.arbitrary import UNICODE
from tests.support.pages import ROOT
from tests.support.scripted_server import ScriptedServer
from tests.support.scripts import status

VALUES: list[tuple[Callable[[], Any], str, str]] = [
    (
        lambda: memstream.Filter(speakers="bob"),
        "speakers",
        "must be a list, tuple or set of strings, not the string 'bob'; for one, write ['bob']",
    ),
    (
        lambda: memstream.Filter(sessions=b"ab"),
        "sessions",
        "must be a list, tuple or set of strings, not the bytes b'ab'",
    ),
    (
        lambda: memstream.Filter(exclude_ids={"a": 1}),
        "exclude_ids",
        "must be a list, tuple or set of strings, not a dict",
    ),
    (lambda: memstream.Filter(speakers=iter("ab")), "speakers", "not a str_ascii_iterator"),
    (lambda: memstream.Filter(speakers=["a", 7]), "speakers[1]", "must be a string, not 7 (int)"),
    (lambda: memstream.Filter(speakers=["\ud800"]), "speakers[0]", r"has a lone surrogate ('\ud800') at character 1"),
    (lambda: memstream.Filter(tiers="sensory"), "tiers", "; for one, write ['sensory']"),
    (
        lambda: memstream.Filter(tiers=["top"]),
        "tiers[0]",
        "must be one of sensory, short_term, long_term, not the string",
    ),
    (lambda: memstream.Filter(kinds=[memstream.Tier.SENSORY]), "kinds[0]", "must be one of observation, insight"),
    (
        lambda: memstream.Filter(speaker=["bob"]),
        "speaker",
        "is no argument of Filter(): did you mean speakers? it takes",
    ),
    (lambda: memstream.Filter(observe_time_min="2026"), "observe_time_min", "must be an aware datetime or None, not"),
    (lambda: memstream.Filter(observe_time_max=datetime(2026, 5, 8)), "observe_time_max", "without a time zone"),
    (lambda: memstream.Filter(importance_min=True), "importance_min", "must be a number or None, not True (bool)"),
    (
        lambda: memstream.Filter(importance_min=float("nan")),
        "importance_min",
        "must be a finite number, not nan (float)",
    ),
    (
        lambda: memstream.Filter(metadata={"n": {"$gt": 3}}),
        "metadata.n",
        "a list, tuple or set of strings, numbers, bools or None, a Condition or None, not a dict",
    ),
    (
        lambda: memstream.Filter(metadata={"n": [1, [2]]}),
        "metadata.n[1]",
        "must be a string, a number, a bool or None, not a list",
    ),
    (lambda: memstream.Filter(metadata={7: 1}), "a key of metadata", "must be a string, not 7 (int)"),
    (lambda: memstream.Filter(metadata=[("n", 1)]), "metadata", "must be a mapping of strings to"),
    (lambda: memstream.Observation(7), "body", "must be a string or a Structured, not 7 (int)"),
    (
        lambda: memstream.Observation("x", metadata={"n": 2**63}),
        "metadata.n",
        "must be between -9223372036854775808 and",
    ),
    (lambda: memstream.Observation("x", metadata={"n": 10**5000}), "metadata.n", "not an int of 16610 bits"),
    (lambda: memstream.Observation("x", metadata={"n": float("inf")}), "metadata.n", "must be a finite number"),
    (lambda: memstream.Observation("x", token_count=-1), "token_count", "must be between 0 and 2147483647, not -1"),
    (lambda: memstream.Observation("x", ttl=5), "ttl", "must be a timedelta or None, not 5 (int)"),
    (lambda: memstream.Structured(thought=None), "thought", "must be a string, not None"),
    (lambda: memstream.Structured("x", question="y"), "question", "is given to Structured() twice"),
    (lambda: memstream.Structured(*["x"] * 9), "Structured", "takes 8 arguments by position at most"),
    (lambda: memstream.Weights(alpha="1"), "alpha", "must be a number or None, not the string '1'"),
    (lambda: memstream.Cursor("x", True), "revision", "must be a whole number, not True (bool)"),
    (lambda: memstream.Cursor("x", -1), "revision", "must be between 0 and 9223372036854775807, not -1 (int)"),
    (lambda: memstream.Observation(), "body", "is required by Observation()"),
    (lambda: memstream.Retry(first_s=-1), "first_s", "must be between 0 and"),
    (lambda: memstream.Client("127.0.0.1:7700"), "settings", "must be a ChannelSettings, not the string"),
    (lambda: memstream.sync.Client("127.0.0.1:7700"), "inner", "must be a Client, not the string"),
    (lambda: memstream.connect(7700), "target", "must be a string, not 7700 (int)"),
    (lambda: memstream.connect(""), "target", "is empty: name the server, as in 127.0.0.1:7700"),
    (
        lambda: memstream.connect("http://x:7700"),
        "target",
        "'http://x:7700' is a URL: write host:port of the gRPC port",
    ),
    *(
        (lambda target=target: memstream.connect(target), "target", "is no address: write host:port, as in 127.0.0.1:")
        for target in (
            "a b:1",
            "host:",
            "host:port",
            "host:0",
            "host:65536",
            ":7700",
            "host/x",
            "::1",
            "a:1:2",
            "u@h:1",
        )
    ),
    (lambda: memstream.sync.connect("https://x"), "target", "is a URL: write host:port of the gRPC port; for TLS pass"),
    (lambda: memstream.connect("x", timeout=3), "timeout", "did you mean timeout_s?"),
    (lambda: memstream.connect("x", timeout_s=float("nan")), "timeout_s", "must be a finite number"),
    (lambda: memstream.connect("x", options=[("a", 1, 2)]), "options[0]", "must be a tuple"),
    (lambda: memstream.connect("x").memory("a/b c"), "memory", "the name of 'a/b c' has ' ' at character 2: letters,"),
    (lambda: memstream.connect("x").memory("ä/b"), "memory", r"the namespace of '\xe4/b' has '\xe4' at character 1"),
    (lambda: memstream.connect("x").memory("a/-b"), "memory", "begins with '-': the first character must be a letter"),
    (lambda: memstream.connect("x").memory(f"a/{'b' * 129}"), "memory", "has 129 characters, at most 128 are allowed"),
    (lambda: memstream.connect("x").memory("a/"), "memory", "the name of 'a/' is empty"),
    (lambda: memstream.connect("x").memory("joy"), "memory", """'joy' has no "/": write "namespace/name\""""),
    (lambda: memstream.connect("x").conversation("a/b/c"), "conversation", "has '/' at character 2"),
    (lambda: memstream.Tls.of_files("/nonexistent"), "roots", "cannot read '/nonexistent': No such file or directory"),
    (lambda: memstream.Tls.of_files(memstream.__file__), "roots", "is not PEM: it has no line -----BEGIN"),
    (lambda: memstream.Tls.of_files(key="x"), "certificate", "a certificate and its key go together"),
    (lambda: memstream.agent.ActionOutput(thought="x"), "thought", "did you mean thoughts?"),
    (lambda: memstream.memory_name(""), "user_id", "is empty"),
]


@pytest.mark.parametrize(("make", "argument", "said"), VALUES)
def test_invalid_values_are_named(make: Callable[[], Any], argument: str, said: str) -> None:
    with pytest.raises(memstream.InvalidArgument) as caught:
        make()
    assert isinstance(caught.value, memstream.InvalidRequest)
    assert isinstance(caught.value, TypeError)
    assert isinstance(caught.value, ValueError)
    assert caught.value.argument == argument
    assert str(caught.value).startswith(f"{argument}: ")
    assert said in str(caught.value)


CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any], str]] = [
    ("observe_batch", ("hello",), {}, "observations"),
    ("observe_batch", (b"hello",), {}, "observations"),
    ("observe_batch", ({"content": "x"},), {}, "observations"),
    ("observe_batch", (["x", 7],), {}, "observations[1]"),
    ("observe_batch", (iter(["x", 7]),), {}, "observations[1]"),
    ("observe_batch", (["x"],), {"ack_level": "sometime"}, "ack_level"),
    ("observe_batch", (["x"],), {"first_sequence": True}, "first_sequence"),
    ("recall_once", ("x",), {"filters": None}, "filters"),
    ("recall_once", ("x",), {"speaker": "bob"}, "speaker"),
    ("recall_once", ("x",), {"top_k": 3}, "top_k"),
    ("recall_once", ("x",), {"filter": {"speakers": ["bob"]}}, "filter"),
    ("recall_once", ("x",), {"limit": True}, "limit"),
    ("recall_once", ("x",), {"limit": -1}, "limit"),
    ("recall_once", ("x",), {"limit": 2.5}, "limit"),
    ("recall_once", ("x",), {"now": "2026-05-08"}, "now"),
    ("recall_once", ("x",), {"now": datetime(2026, 5, 8)}, "now"),
    ("recall_once", ("x",), {"explain": "yes"}, "explain"),
    ("recall_once", ("x",), {"embedding": "x"}, "embedding"),
    ("recall_once", ("x",), {"embedding": ["1", "2"]}, "embedding"),
    ("recall_once", ("x",), {"embedding": [True, False]}, "embedding"),
    ("recall_once", ("x",), {"timeout_s": float("nan")}, "timeout_s"),
    ("recall_once", (["x"],), {}, "what"),
    ("recall_once", (), {}, "what"),
    ("recall_once", ("\ud800",), {}, "what"),
    ("clear", ("sensory",), {}, "tiers"),
    ("forget_fragments", ("01K9ZQ4J3V6Y8M2N5P7R0S1T2W",), {}, "ids"),
    ("restore_fragments", (iter("ab"),), {}, "ids"),
    ("supersede", ("01K9ZQ4J3V6Y8M2N5P7R0S1T2W",), {"newer_id": "x"}, "ids"),
    ("supersede", (["a"],), {}, "newer_id"),
    ("supersede", (["a"],), {"newer_id": "x", "newer_external_id": "y"}, "newer_id"),
    ("supersede", (["a"],), {"newer": "x"}, "newer"),
    ("recall_once", ("x",), {"truth": "newest"}, "truth"),
    ("put_fragment", ("x",), {"supersedes": "key"}, "supersedes"),
    ("put_fragment", ("x",), {"valid_from": "2026-05-08"}, "valid_from"),
    ("list_fragments", (), {"truth": True}, "truth"),
    ("erase_fragments", (), {"filter": "speaker=bob"}, "filter"),
    ("forget_fragments", (), {"filters": memstream.Filter()}, "filters"),
    ("put_fragment", ("x",), {"metadata": {"n": (1,)}}, "metadata.n"),
    ("put_fragment", ("x",), {"external": "k"}, "external"),
    ("put_fragment", ("x",), {"speaker": "\udcff"}, "speaker"),
    ("update_fragment", ("id",), {"expire_time": "soon"}, "expire_time"),
    ("update_fragment", ("id",), {"pinned": 1}, "pinned"),
    ("update_fragment", ("id",), {"metadata": "x"}, "metadata"),
    ("update", (), {"labels": {"team": 5}}, "labels.team"),
    ("update", (), {"policy": {"recall": {"top_k": 5}}}, "policy.recall.top_k"),
    ("list_fragments", (), {"page_size": -1}, "page_size"),
    ("watch", ("yesterday",), {}, "start"),
    ("watch", (), {"types": "promoted"}, "types"),
    ("watch", (), {"types": [memstream.EventType.UNKNOWN]}, "types"),
    ("observe", ("p",), {"outcomes": 1}, "outcomes"),
]


@pytest.mark.parametrize(("method", "given", "named", "argument"), CALLS)
async def test_invalid_arguments_reach_no_server(
    memory: memstream.Memory,
    server: ScriptedServer,
    method: str,
    given: tuple[Any, ...],
    named: dict[str, Any],
    argument: str,
) -> None:
    async def called() -> None:
        result = getattr(memory, method)(*map(copy.copy, given), **named)  # an iterator can be read only once
        if inspect.isawaitable(result):
            await result

    with pytest.raises(memstream.InvalidArgument) as caught:
        await called()
    assert caught.value.argument == argument
    assert not server.metadata


@pytest.mark.parametrize(("method", "given", "named", "argument"), CALLS)
def test_blocking_calls_check_the_same_arguments(
    method: str, given: tuple[Any, ...], named: dict[str, Any], argument: str
) -> None:
    memory = memstream.sync.connect("127.0.0.1:1").memory("ns/m")
    with pytest.raises(memstream.InvalidArgument) as caught:
        getattr(memory, method)(*map(copy.copy, given), **named)
    assert caught.value.argument == argument


async def test_none_means_not_given(memory: memstream.Memory) -> None:
    async with memory.observe("p") as stream, memory.recall() as recall:
        await stream.send("x", ttl=None, importance=None, embedding=None, observe_time=None)
        await stream.flush()
        nothing: memstream.RecallOptions = {"limit": None, "filter": None, "weights": None, "timeout_s": None}
        nothing |= {"embedding": None, "now": None, "min_revision": None, "explain": None, "near_misses": None}
        assert await recall.query("x", **nothing) == await recall.query("x")


async def test_numbers_of_numpy_are_numbers(memory: memstream.Memory, server: ScriptedServer) -> None:
    async with memory.observe("p") as stream:
        await stream.send("x", metadata={"n": np.int64(5), "f": np.float32(0.5)}, token_count=np.int32(3))
    (kept,) = [item for producer in server.producers.values() for item in producer.items]
    assert (kept.metadata["n"].int_value, kept.metadata["f"].double_value, kept.token_count) == (5, 0.5, 3)


def test_enums_may_be_given_by_value() -> None:
    chosen = memstream.Filter(tiers=["long_term"], kinds=["insight"])  # type: ignore[list-item]
    assert chosen == memstream.Filter(tiers=[memstream.Tier.LONG_TERM], kinds=[memstream.FragmentKind.INSIGHT])


@pytest.mark.parametrize("token", ["", "two words", "line\n", "ä", "\ud800", lambda: 7, lambda: "ä"])
async def test_invalid_tokens_are_rejected(token: Any) -> None:
    with pytest.raises(memstream.InvalidArgument) as caught:
        async with memstream.connect("127.0.0.1:1", token=token) as client:
            await client.server_info()
    assert caught.value.argument == "token"
    assert repr(token) not in str(caught.value)


def test_secret_is_not_shown() -> None:
    for make in (
        lambda: memstream.connect("x", token=b"secret"),  # type: ignore[arg-type]
        lambda: memstream.Tls(private_key="secret"),  # type: ignore[arg-type]
    ):
        with pytest.raises(memstream.InvalidArgument) as caught:
            make()
        assert "secret" not in str(caught.value)


async def test_invalid_source_of_import_is_rejected(client: memstream.Client, tmp_path: Path) -> None:
    async def lines() -> Any:
        yield "text"

    for source in (tmp_path / "absent", str(tmp_path), "a\x00b", lines(), 7, [b"x"]):
        with pytest.raises(memstream.InvalidArgument) as caught:
            await client.import_("ns", source)  # type: ignore[arg-type]
        assert caught.value.argument == "source"


def test_help_names_the_options() -> None:
    for method in (memstream.Memory.recall_once, memstream.RecallStream.query, memstream.sync.Memory.recall_once):
        assert {"limit", "filter", "timeout_s"} <= inspect.signature(method).parameters.keys()
    assert "speaker" in inspect.signature(memstream.ObserveStream.send).parameters


# ---- messages of errors


def test_server_error_repeats_no_violation() -> None:
    refused = status(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
    refused.message = "query.text: is empty; query.limit: must be between 1 and 1,000, is 0"
    bad = BadRequest()
    bad.field_violations.add(field="query.text", description="is empty")
    bad.field_violations.add(field="query.limit", description="must be between 1 and 1,000, is 0")
    refused.details.add().Pack(bad)
    assert str(error_from_status(refused)) == f"INVALID_FIELD: {refused.message}"
    bad.field_violations.add(field="query.now", description="is in the future; clocks differ")
    refused.details.add().Pack(bad)
    assert (
        str(error_from_status(refused))
        == f"INVALID_FIELD: {refused.message} (query.now: is in the future; clocks differ)"
    )


def test_rejected_template_is_named_once() -> None:
    with pytest.raises(memstream.InvalidArgument) as caught:
        render_template("user_prompt_template", "{{ 1 / 0 }}", {})
    assert str(caught.value) == "user_prompt_template: failed with ZeroDivisionError: division by zero"


# ---- names


@given(st.one_of(st.text(UNICODE, min_size=1, max_size=31), st.text("ab.-_~/@ é日\U0001f600", min_size=1, max_size=23)))
def test_memory_name_is_reversible(user_id: str) -> None:
    name = memstream.memory_name(user_id)
    assert memstream.connect("x").memory(f"users/{name}").name == name
    assert memstream.user_id_of(name) == user_id


@given(st.text(UNICODE, min_size=1, max_size=20), st.text(UNICODE, min_size=1, max_size=20))
def test_different_ids_have_different_names(one: str, other: str) -> None:
    assert (memstream.memory_name(one) == memstream.memory_name(other)) is (one == other)


def test_names_are_those_of_all_languages() -> None:
    """The table of the SDKs in Go and TypeScript, too: they address the same memory of a user."""
    table = json.loads((ROOT / "tests/conformance/user_ids.json").read_text("utf-8"))
    assert {user_id: memstream.memory_name(user_id) for user_id in table["names"]} == table["names"]
    assert [memstream.user_id_of(name) for name in table["names"].values()] == list(table["names"])
    for user_id in (*table["refused_ids"], "\ud83d"):
        with pytest.raises(memstream.InvalidArgument):
            memstream.memory_name(user_id)
    for name in table["refused_names"]:
        with pytest.raises(memstream.InvalidArgument):
            memstream.user_id_of(name)


@pytest.mark.parametrize("length", [94, 95])
def test_too_long_user_id_is_rejected(length: int) -> None:
    user_id = "é" * (length // 2) + "/" * (length % 2)
    if length <= 94:
        assert memstream.user_id_of(memstream.memory_name(user_id)) == user_id
    else:
        with pytest.raises(memstream.InvalidArgument, match="has 95 bytes of UTF-8, but a name holds 94"):
            memstream.memory_name(user_id)


@pytest.mark.parametrize(
    "name", ["u~bob", "u~zz", "u~~zz", "b~bob", "b~!", "b~5pel5pel", "-a", "a b", "~", "u~", "b~", "é"]
)
def test_foreign_name_has_no_user_id(name: str) -> None:
    with pytest.raises(memstream.InvalidArgument, match="which memory_name did not make"):
        memstream.user_id_of(name)
