"""`memstream doctor`: what is wrong with a server's data and environment, and what to do. Changes nothing.

examine: runs all checks in order; the value `Finding` and its levels
"""
