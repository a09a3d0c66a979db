"""The vector index on Milvus: Milvus Lite as a supervised child process, or a server by URI."""
