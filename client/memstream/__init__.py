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
