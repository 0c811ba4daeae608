"""
Opens transformers' configurations without formatting each of them as text.

transformers formats a log line for each configuration, at every log level. huggingface_hub
formats a reason for each part that is no dictionary. Formatting a configuration builds three others
and takes five times as long as opening it.
"""

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedConfig
from transformers.utils import logging as transformers_logging

_WRITTEN_OUT: Any = PreTrainedConfig.__repr__
"""Original method, restored on exit, also by the last of several threads."""


@contextlib.contextmanager
def configs_by_name() -> Iterator[None]:
    """
    Shorten the text of configurations to their class name until the block ends.

    Where transformers logs at level info, configurations are formatted in full as always.
    """
    if transformers_logging.get_verbosity() <= logging.INFO:
        yield
        return
    PreTrainedConfig.__repr__ = _name_of
    try:
        yield
    finally:
        PreTrainedConfig.__repr__ = _WRITTEN_OUT


def _name_of(config: Any) -> str:
    return type(config).__name__
