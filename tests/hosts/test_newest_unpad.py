"""The tests of `unpad`, which run in the pinned environment, in that of the newest trainers too."""

from tests.e2e.test_unpad import *  # noqa: F403  # the same tests, elsewhere
from tests.hosts.pages import hosted

pytestmark = hosted
