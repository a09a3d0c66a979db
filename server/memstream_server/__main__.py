"""The `memstream` command: says plainly what is missing where only the SDK is installed."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line. Exits 1 with a message when the server's packages are not installed."""
    try:
        from memstream_server.cli import main as run
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("memstream"):
            raise
        sys.exit(
            f"memstream: the package {error.name} is missing. The SDK alone is installed here;\n"
            "the command line and the server come with: pip install '.[server]'"
        )
    run()


if __name__ == "__main__":
    main()
