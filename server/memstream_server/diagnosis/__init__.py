"""`memstream doctor`: what is wrong with a server's data and environment, and what to do. Changes nothing.

findings: the value `Finding` and its levels
directory: files, lock, format, write-ahead log and disk of a data directory
examine: runs all checks in order; those of packages, models, endpoints, the files of Milvus Lite, and of a journal:
    pages, version, embedding space, waiting work
"""
