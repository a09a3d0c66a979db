"""A LangGraph store on a memstream server.

    client = memstream.sync.connect("127.0.0.1:7700")
    store = MemstreamStore(client, "assistant", fields=["text"])
    store.put(("users", "bob"), "name", {"text": "Bob likes plays about trains"})
    store.search(("users",), query="what does he like?")

`langgraph.store.base` comes with the extra `memstream[langgraph]`. What is refused or not reached raises a
MemstreamError (see memstream.errors).
"""

from memstream.langgraph.store import MemstreamStore

__all__ = ["MemstreamStore"]
