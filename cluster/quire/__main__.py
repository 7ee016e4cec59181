"""``quire`` and ``python -m quire``."""

import sys

from quire.cluster.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
