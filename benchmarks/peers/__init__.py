"""memstream beside other memory systems. `python -m benchmarks.peers` runs the comparison."""

import sys
from pathlib import Path

# The benchmarks beside this folder are scripts that import each other by their bare names. Last on the path: nothing of
# a peer's is hidden by them.
sys.path.append(str(Path(__file__).parents[1]))
