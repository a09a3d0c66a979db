"""What the parts of the engine share.

dependencies: the groups that parts receive: storage, models, runtime; the protocols for events and index health
registry: active memories: activation, eviction, reload after a failure; at most one actor per memory
ownership: the lease of this process and the epochs of its memories
turns: which caller computes next on the event loop, by measured cost
threads: threads that work for callers, in turns by principal
call_context: the account, log and trace context of the call that work is done for; the queue of accounts, by cost
clock: time and time-ordered ids; the engine reads clocks and random bytes only here
"""
