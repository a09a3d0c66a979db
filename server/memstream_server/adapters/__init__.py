"""Implementations of the ports. Nothing but `app`, `diagnosis` and `cli` imports them.

images: images of memories that are not in RAM
journal: the journal on SQLite or PostgreSQL
milvus: the vector index on Milvus Lite or a Milvus server
models: embedders, scorers, LLM, reranker, analyzer
"""
