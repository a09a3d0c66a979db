"""Messages of memstream.v1 to domain values and back: pure functions, no I/O, no engine."""
