"""Tests of blocks: edits, the store, the server, the SDK."""
