"""`python -m spmdctx`: the command line."""

import sys

from spmdctx.cli import main

sys.exit(main())
