"""The journal: the source of truth. Everything else (RAM, Milvus) can be rebuilt from it.

port: the protocol `Journal` and its contract
records: what it keeps of a memory besides fragments, as receipts of recalls, and waiting work
rows: fragments with vectors and terms, by row or by column
writing: the receipt (makes *received*) and the commit (makes *stored*)
reading: queries, a memory as it is loaded, the scan for exports
spaces: embedding spaces, and vectors in the next one
errors: what it raises
"""
