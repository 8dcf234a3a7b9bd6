"""`python -m flows`: the same as the command `forgeline`."""

import sys

from flows.cli import main

sys.exit(main())
