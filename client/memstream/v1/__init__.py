"""The contract, generated from protos/memstream/v1 by scripts/generate.py; never edited by hand."""
