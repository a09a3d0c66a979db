"""The journal: the source of truth. Everything else (RAM, Milvus) can be rebuilt from it.

port: the protocol `Journal` and its contract
records: what it keeps besides fragments: memories, receipts of recalls, waiting work, embedding spaces
rows: fragments with vectors and terms, by row or by column
writing: the receipt (makes *received*) and the commit (makes *stored*)
reading: queries, a memory as it is loaded, the scan for exports
errors: what it raises
"""
