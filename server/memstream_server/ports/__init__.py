"""What the engine needs from the outside world, as protocols; adapters/ implement them.

Each protocol's docstring is its contract: ordering, idempotency, ownership, and what a failure leaves behind.
The conformance suites (tests/journal/conformance/ and conformance.py in tests/index/, tests/conversations/ and
tests/operations/) hold every adapter to it.
"""
