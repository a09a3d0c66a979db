"""One active memory. All changes are decided and committed one after another, in the order of receipt.

actor: the task that orders and commits all changes of the memory
ingest: sessions, which number and order observations and give them to the journal, then to the actor
producers: the numbers of producers, the observations that wait, and what a resuming client has missed
batch_calls: ObserveBatch calls, and the stored answers to their request_ids
receipts: from validated items to a receipt; stored answers of receipts
enrich: terms, vectors and importances of fragments, fetched before a decision; terms of another analyzer's version; the
    embedding space in force and the next one
known_fragments: the fragments that a group of observations may repeat, echo or update
related: earlier statements near to a new one: named in its outcome, or suspected
decision: what was decided for the memory, and the journal transaction that it becomes
superseding: what an observation supersedes, and the chains of fragments that leave or return
decide: decides what observations do to the memory
working_set: the memory in RAM: its state and its search structures
image_changes: the rows that an image lacks, and which commits it does not outlive
search_structures: attributes, postings and vectors by slot, without content
fragment_cache: fragments that recall is likely to return
"""
