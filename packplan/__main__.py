"""Runs the command `packplan` for `python -m packplan`."""

import sys

from packplan.app import main

sys.exit(main())
