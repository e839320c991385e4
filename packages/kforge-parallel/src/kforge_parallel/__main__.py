"""``python -m kforge_parallel`` is ``kforge-parallel``."""

import sys

from kforge_parallel.cli import main

if __name__ == "__main__":
    sys.exit(main())
