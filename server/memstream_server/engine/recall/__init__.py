"""Answers queries. An answer is of one revision; reinforcement follows the answer.

recall: searches a memory for a query and reads the fragments of the answer
answers: builds an answer from a ranking, within its budget of tokens
rank_memory: ranks the working set of a memory
past: the fragments of a memory as of an earlier revision, to read or to rank
recall_receipts: receipts of recalls, kept and replayed
reranking: the reranker's scores for the best of a ranking
scopes: recalls over several memories
standing_query: the answer to a query, then each change of it; the list of those that are open
reinforcement: offers recalled fragments to short-term and counts accesses
watch: a memory's committed transitions in order
"""
