"""The `memstream` command: says plainly what is missing where only the SDK is installed."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line. Exits 1 with a message when the server's packages are not installed."""
    if sys.argv[1:2] == ["hook"] and not {"--help", "-h"} & set(sys.argv):
        from memstream.hooks import main as run_hook  # a host waits for it: the packages of the others take too long

        run_hook(sys.argv[2:])
        return
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
