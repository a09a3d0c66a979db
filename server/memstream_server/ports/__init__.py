"""What the engine needs from the outside world, as protocols; adapters/ implement them.

Each protocol's docstring is its contract: ordering, idempotency, ownership, and what a failure leaves behind.
The conformance suites in tests/conformance_ports/ hold every adapter to it.
"""
