"""Work that no call waits for.

task: what starts and stops most of it
indexer: writes the outbox to the vector index; one process at a time
index_reconciler: compares the index with the journal and enters differences into the outbox
index_follower: how far another process has indexed this process's memories
index_overlays: when vectors leave the overlays of large memories
missing_vectors: fragments whose text the model refused: when they are embedded again
jobs: insights, reflections, missing vectors and importances; rows of the journal, each done once
conflict_job: the job that asks the LLM about a suspicion
feeds: feeds memories with the messages of conversations
compaction: brings vectors of an earlier server into smaller forms, once
retention: forgets by age, strength and number; erases after the grace period; prunes events
"""
