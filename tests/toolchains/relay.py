"""Runs inside a network namespace: brings loopback up, starts a server, and forwards a unix socket to its port.

A unix socket in the file system is reachable from every network namespace, so the tests run outside. It ends with the
process that holds the other end of its standard input, however that one ends: a signal for the parent's death is lost
where a user namespace begins.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass  # the connection has ended
    finally:
        writer.close()


async def _end_with_parent(server: asyncio.subprocess.Process) -> None:
    parent = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(parent), sys.stdin)
    await parent.read()
    server.kill()


async def main(path: str, port: int, command: list[str]) -> int:
    """Starts the command, forwards to it until it or the parent ends, and returns its exit code."""
    server = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.DEVNULL)
    ending = asyncio.create_task(_end_with_parent(server))

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, here = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            writer.close()  # not up yet
            return
        await asyncio.gather(_copy(reader, here), _copy(there, writer))

    async with await asyncio.start_unix_server(carry, path):
        code = await server.wait()
    ending.cancel()
    return code


if __name__ == "__main__":
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    sys.exit(asyncio.run(main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])))
