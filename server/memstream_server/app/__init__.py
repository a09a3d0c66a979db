"""The composition root: builds a running server from settings. No other package names every concrete part.

dependencies: what the engine is given, with its metrics
embedders: the table of embedders, by the setting `embedding`
errors: why a server does not start
models: embedder, reranker and LLM from the settings; their recorded calls, status and metrics
process: signals, allocator, garbage collector and event loop of the process
running: opens tracing, images, index and embedding space; starts a server and closes its parts in reverse order
"""
