"""`python -m kforge_train` is the `kforge` command; torchrun starts it so."""

from __future__ import annotations

import logging
import os
import sys

from kforge_train.cli import main

if __name__ == "__main__":
    code = main()
    if os.environ.get("WORLD_SIZE", "1") == "1":
        sys.exit(code)
    # A thread of gloo that outlives its group aborts the process in about one of thirty normal exits.
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
