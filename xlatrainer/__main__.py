"""`python -m xlatrainer`: what to ask of an installation, and tools to debug with."""

import sys

from xlatrainer.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
