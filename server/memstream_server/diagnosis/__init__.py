"""`memstream doctor`: what is wrong with a server's data and surroundings, and what to do, without changing anything.

Reading order: findings (what is said), directory (files, lock, disk), journal (what is in it), index (Milvus Lite's
files), outside (packages, database, models, endpoints), then examine, which asks them all.
"""
