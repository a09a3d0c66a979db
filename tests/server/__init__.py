"""Tests of the real server: processes on loopback, with real SQLite, real Milvus Lite and the real SDK."""
