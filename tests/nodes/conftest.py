"""Tests of ranks on several nodes: processes over loopback, or Ray clusters in network namespaces.

`bench` is not installed, so the repository's root is added to the path.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))
