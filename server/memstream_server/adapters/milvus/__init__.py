"""The vector index (`ports.index`) on Milvus: Milvus Lite as a supervised child process, or a server by URI.

Invariant: nothing is in the index only. Whatever is lost or damaged is filled again from the journal.

index: `MilvusIndex`: sessions, restarts and generations; `open_lite` and `connect_milvus`
collection: one collection: pymilvus' blocking calls
columns: bulk inserts into Milvus Lite as columns
naming: names of collections and partitions; encoded ids
lite: start on demand, readiness and end of the Milvus Lite child process
child: the program that the child process runs
pandas_later: imports pymilvus without pandas
existing: reads a foreign collection, for imports
"""
