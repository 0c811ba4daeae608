"""The tests of `unpad`, which run in the pinned environment, in that of the newest trainers too."""

import pytest

from tests.e2e.test_unpad import *  # noqa: F403  # the same tests, elsewhere
from tests.hosts.pages import hosted

# Newer transformers warns of names that older versions have alone.
pytestmark = [hosted, pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning")]
