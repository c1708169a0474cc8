"""`python -m outrider`: the command, for launchers that want a module (`torchrun -m outrider`)."""

import sys

from outrider.cli import main

if __name__ == "__main__":
    sys.exit(main())
