"""`python -m spmdctx`: the command line."""

import sys

from spmdctx.cli.main import main

sys.exit(main())
