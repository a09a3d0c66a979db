"""Whether the server of this container serves: exit 0 or 1. Asks grpc.health.v1 at the port of MEMSTREAM_LISTEN.

MEMSTREAM_HEALTH_SERVICE is the service asked about. With MEMSTREAM_TLS_CERT_FILE set it speaks TLS, and trusts that
certificate and no other; MEMSTREAM_HEALTH_NAME is then the name in it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

DEADLINE_S = 4.0


def main() -> int:
    """Ask once."""
    listen = os.environ.get("MEMSTREAM_LISTEN") or "127.0.0.1:7700"
    target = listen if listen.startswith("unix:") else f"127.0.0.1:{listen.rpartition(':')[2]}"
    service = os.environ.get("MEMSTREAM_HEALTH_SERVICE", "memstream.v1.StreamService")
    certificate = os.environ.get("MEMSTREAM_TLS_CERT_FILE")
    if certificate:
        name = os.environ.get("MEMSTREAM_HEALTH_NAME", "localhost")
        credentials = grpc.ssl_channel_credentials(Path(certificate).read_bytes())
        channel = grpc.secure_channel(target, credentials, options=[("grpc.ssl_target_name_override", name)])
    else:
        channel = grpc.insecure_channel(target)
    with channel:
        try:
            request = health_pb2.HealthCheckRequest(service=service)
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=DEADLINE_S)
        except grpc.RpcError as error:
            print(f"{target} does not answer: {error.code().name}", file=sys.stderr)
            return 1
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        print(f"{service} at {target} does not serve", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
