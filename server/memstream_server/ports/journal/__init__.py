"""The journal: the only truth. Everything else (RAM, Milvus) can be rebuilt from it.

In reading order: records and rows (what it keeps), writing (the receipt and the commit), reading (what comes back),
spaces (whose vectors), port (the protocol and its contract), errors.
"""
