"""Ranks on several nodes: processes over loopback, or real clusters in network namespaces.

`bench` is run from the root of the repository and is on no path by itself.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))
