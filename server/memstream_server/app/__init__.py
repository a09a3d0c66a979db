"""The composition root: builds a running server from settings. No other package names every concrete part.

dependencies: what the engine is given, with its metrics
embedders: the table of embedders, by the setting `embedding`
errors: why a server does not start
event_loop: the event loop, which drains gRPC's wake-up socket
models: embedder, reranker and LLM from the settings
process: signals, allocator and garbage collector of the process
running: opens tracing, images, index and embedding space; starts a server and closes its parts in reverse order
watched_models: the recorded models that the engine gets; status and metrics of their calls
"""
