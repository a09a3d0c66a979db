"""The tier semantics as pure functions over frozen values.

Rule 1. Values in, values out: no clock, no randomness, no I/O, no lock, no logging. Time, ids, draws,
vectors and importances arrive as fields of the values; writes, insights and events leave in a Transition.
Rule 2. A decision is a function of its arguments alone, so a retry after a crash decides the same.
Rule 3. Only the standard library and numpy are imported (held by import-linter).
"""
