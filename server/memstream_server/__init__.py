"""The memstream server: hybrid agent memory over gRPC."""
