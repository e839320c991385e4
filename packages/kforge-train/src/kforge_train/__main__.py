"""`python -m kforge_train` is the `kforge` command; torchrun starts it so."""

from __future__ import annotations

import sys

from kforge_train.cli import main

if __name__ == "__main__":
    sys.exit(main())
