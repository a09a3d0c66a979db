"""memstream: an agent's memory over gRPC.

    async with memstream.connect("127.0.0.1:7700") as client:
        joy = await client.create_memory("comedy/joy", exist_ok=True)
        async with joy.observe(producer="joy-1", session="monday") as stream:
            await stream.send("user: My name is Bob")
            await stream.flush()
        for hit in await joy.recall_once("What's my name?", limit=5, explain=True):
            print(hit.fragment.content, hit.score)

Scripts without an event loop use memstream.sync, which has the same names. Exceptions are in memstream.errors, and
here.
"""

# Modules of the package:
#   v1: the generated contract.
#   public: the public names of `memstream`.
#   client, channel, connections, backoff, status: connections, calls, retries, and the translation of gRPC errors.
#   any_loop: clients that any event loop may use.
#   local_client, local_server, local_files: a server that ends with its users (`memstream.local`).
#   errors: the exception tree.
#   memory, fragment_listing, observe, recall, standing, watch: the handle of a memory and its streams.
#   twoway, ledger, sent: the reconnecting stream below observe and recall, and the unacknowledged observations.
#   conflict_values: suspicions and their decisions, related statements.
#   receipt_values: receipts of recalls, and their replays.
#   listed_values: what lists have: sessions, conversations, open standing queries, the order of fragments.
#   blocks: blocks of a memory, their versions, edits and watch.
#   following: a stream of answers as an iterator, across reconnections.
#   conversations, conversation_watch, conversation_values: conversations, their watch, their messages and plans.
#   states: state documents of apps, users and sessions.
#   transactions: writes to conversations, states and a memory, all or nothing.
#   transfer: export and import.
#   times: the reader of times as people and models write them.
#   values, resources, policy: arguments and results as frozen values.
#   answer_values: the answer to a query.
#   codec, answer_codec, receipt_codec, listed_codec, resource_codec, policy_codec, wiretypes: conversion of values to
#     and from the wire.
#   arguments, argument_types, kinds, value_kinds, names: checks of arguments.
#   agent, templates: an agent's memory with prompt templates.
#   otel: OpenTelemetry tracing.
#   sync: the blocking SDK.
#   mcp, langgraph, dbgpt: adapters for MCP hosts, LangGraph and DB-GPT.
#   agent_framework, anthropic, google_adk, llama_index, openai_agents, pydantic_ai, strands: adapters for other agent
#     frameworks (docs/frameworks.md).
#   frameworks: what these share.

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memstream.public import *  # noqa: F403 - its __all__ names them
else:
    # Import lazily: a server imports only memstream.v1, and the rest would take a tenth of its start time.
    def __getattr__(name: str) -> Any:
        public = import_module("memstream.public")
        globals().update({each: getattr(public, each) for each in public.__all__}, __all__=public.__all__)
        if name in globals():
            return globals()[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__getattr__("__all__")})
