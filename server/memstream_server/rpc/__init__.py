"""The wire: decodes what clients send, calls the engine, encodes what it answers.

Rule 1. Nothing here decides about tiers or scores: a handler validates, calls the engine and encodes.
Rule 2. Every refusal is an EngineError; errors.py has the one table from its reason to a status.
Rule 3. The end of a request stream is not "the client has finished": only its explicit `close` is.
Rule 4. Stream handlers are async generators with plain tasks beside them, cancelled and gathered in `finally`.
"""
