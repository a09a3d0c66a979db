"""Long-running operations: started by a call, cancellable, resumed after a restart.

runner: runs operations, records what their work reports, cancels and resumes them
erase: removes fragments and all that derives from them from every store and file
reembed: rebuilds the index; embeds everything with another model while recalls continue, then switches the space
transfer: exports and imports
"""
