"""Work that no call waits for.

task: what starts and stops most of it
indexer: writes the outbox to the vector index, and compares it with the journal; one process at a time; how far the
    index is, and when vectors leave the overlays of large memories
vectors: embeds missing ones again; brings those of an earlier server into smaller forms, once
jobs: insights, reflections, missing vectors and importances, questions about suspicions; each done once;
    the operation reflect
feeds: feeds memories with the messages of conversations
standing_blocks: blocks that keep themselves: recalls their questions, and writes what has changed
retention: forgets by age, strength and number; erases after the grace period, and by the operation purge; prunes events
"""
