"""`python -m kforge_data`: the same as the command `kforge-data`."""

from kforge_data.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
