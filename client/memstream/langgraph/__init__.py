"""A LangGraph store and checkpointer on a memstream server.

    client = memstream.sync.connect("127.0.0.1:7700")
    store = MemstreamStore(client, "assistant", fields=["text"])
    store.put(("users", "bob"), "name", {"text": "Bob likes plays about trains"})
    store.search(("users",), query="what does he like?")

The extra `langgraph` installs `langgraph.store.base`. Failed calls raise a MemstreamError (see
memstream.errors).

Modules:
store: MemstreamStore.
operations: checks LangGraph's operations.
items: converts items to fragments and back.
matching: evaluates filters and namespace conditions.
checkpoints: MemstreamSaver.
naming: maps namespaces to memory names, and keys to external ids.
"""

from memstream.frameworks import framework

with framework("langgraph-checkpoint"):
    from memstream.langgraph.checkpoints import MemstreamSaver
    from memstream.langgraph.store import MemstreamStore

__all__ = ["MemstreamSaver", "MemstreamStore"]
