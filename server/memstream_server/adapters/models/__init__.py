"""The implementations of ports/models.py: analyzer, embedders, reranker, and LLM scoring, insights and decisions.

Invariant: no text of one namespace appears in a prompt, an error or a cache entry of another.

Text analysis:
    words: words, characters, spellings and stems of a text; bounded caches of them, one per namespace
    analyzer: lexical terms: hashed stems with counts; detects the language of a text

Local models:
    hashing: the `hashing` embedder, which needs no model
    onnx_models: the `onnx` embedder, and the cross-encoder that reranks recollections
    local: the known models that `memstream models` installs

Endpoints (OpenAI-compatible HTTP APIs):
    endpoint: the HTTP client: URL, headers, size limits, error texts; finds which optional request parts an endpoint
        accepts, in one run that concurrent callers share
    resilience: error classes and what each one means for a retry; backoff, deadline and circuit breaker
    openai_embedder: the `openai` embedder; combines the texts of concurrent callers into requests
    openai_chat: the LLM client: questions with JSON answers
    budget: rate limits by requests and tokens
    replies: extracts the JSON answer from a chat completion
    llm_questions: what an LLM is asked: importance scores, insights, reflections, decisions about suspicions; the
        schemas of its answers
    prompts: prompt templates
"""
