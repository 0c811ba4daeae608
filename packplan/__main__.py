"""`python -m packplan` is `packplan`."""

import sys

from packplan.app import main

sys.exit(main())
