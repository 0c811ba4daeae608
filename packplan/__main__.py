"""Run the command `packplan` as `python -m packplan`."""

import sys

from packplan.app import main

sys.exit(main())
