"""The domain logic of a memory as pure functions over frozen values: tiers, ranking, folding, retention, erasure.

Invariants:
1. Values in, values out: no clock, no randomness, no I/O, no lock, no logging. The caller passes time, ids,
   draws, vectors and importances; a decision returns writes, insight requests and events in a Transition.
2. A decision depends on its arguments alone, so a retry after a crash decides the same.
3. Only the standard library, numpy and msgspec are imported (import-linter enforces the layers).

Values and decisions:
    values: observations, fragments, held fragments, the state of a memory
    policy: the tunables of a memory with units, bounds and defaults, in two profiles
    events: the event types of a memory's log
    transition: the outcome of a decision, and the draft that builds it
    tiers: what happens to an observation or a recollection in each kind of memory
    enhancement: when an observation enhances a short-term fragment, with reproducible draws; the merged content of a
        promotion
    identity: when an observation repeats or echoes a fragment; hashes that are the same in every process, and the index
        that finds repeats; fragments with the same words become one recollection
    lifecycle: clear, forget, restore, erase, update, pin, fill vectors, rate, insert insights
    supersession: which fragment a newer one corrects, and the chains that follow
    departures: what a fragment that leaves, or returns, does to its chains
    suspicions: pairs of statements that may not be true together, and what was decided about them
    twins: which statements of a speaker share so many words that the later one goes first
    lineage: which fragments an erasure reaches through sources and merged contents
    retention: which fragments are due to be forgotten
    replay_events: the places of all fragments, from events alone
    timeline: a memory as of an earlier revision, from its log and the versions that were kept

Recall:
    arrays: growable numpy arrays
    columns: the attributes of fragments as numpy columns
    metadata: conditions on metadata, and an index of its values
    filters: which fragments a recall may return, and a list has, in which order
    session_summaries: the sessions of a memory, from the columns
    dense: cosines over the vectors of a memory; int8 copies with bounds on the errors
    postings: the inverted index as flat arrays
    neighbours: context windows of fragments within a session
    lexical: BM25 of a fragment, and of a fragment with its context window
    signals: the values of some fragments on each leg; superseded ones lend theirs to the current end of their chain
    scores: the weights of a score, and scores as sums of parts
    ranking: scores from dense, lexical, recency and importance parts; the best fragments of each leg, and the
        vectors that a ranking by int8 copies must read
    fitted_weights: weights of the parts of relevance, by kind of embedding
    ranking_dbgpt: DB-GPT's ranking, for the `dbgpt` profile
    speakers: the speaker that a query names, and names that say a role
    dialogue: who speaks, how much of the context counts, and which reply answers which message
    time_phrases: the times that a query names, and how near a fragment is to them
    budget: the token budget of a recall
    blocks: edits of a block's text
    context: what an agent sends to its model before a turn, within a budget
    rendering: the indexed text of a fragment; the marks around text that a context injects
    json_text: whether a text is JSON
    printable: escapes text for logs, errors and terminals; the characters of a content that nobody sees
"""
