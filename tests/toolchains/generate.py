"""Write the generated Go and TypeScript code from protos/: `make generate-clients`."""

from __future__ import annotations

from tests.toolchains import languages
from tests.toolchains.languages import ROOT, Go


def main() -> None:
    """Raises Absent without go, node, or their packages."""
    languages.buf("buf.gen.yaml", Go().plugins(), ROOT)
    languages.buf("client/typescript/buf.gen.yaml", languages.node().bin, ROOT)


if __name__ == "__main__":
    main()
