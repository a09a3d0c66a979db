"""Models behind ports/models.py: the lexical analyzer, the hashing embedder, OpenAI-compatible endpoints."""
