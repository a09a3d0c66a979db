"""Long-running operations: started by a call, cancellable, resumed after a restart.

runner: runs operations, records their progress, cancels and resumes them
progress: what the work of an operation reports; its cancellation
erase: removes fragments and all that derives from them from every store and file
purge: erases forgotten fragments after their grace period
reembed: embeds everything with another model while recalls continue, then switches the space
reindex: rebuilds the index from the journal's vectors
reflect: reflects on a memory on request
transfer: exports and imports
"""
