"""
Opens transformers' configurations without writing each of them out.

For each that it opens, transformers formats a line of its log, whether anybody reads it or not, and
for each part of one, huggingface_hub the reason why it is no dictionary. To write a configuration
out, transformers builds three others, and takes five times as long as to open it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedConfig
from transformers.utils import logging as transformers_logging

_WRITTEN_OUT: Any = PreTrainedConfig.__repr__
"""What is put back, also by the last of several threads that are inside."""


@contextlib.contextmanager
def configs_by_name() -> Iterator[None]:
    """
    Let the text of a configuration be the name of its class, inside; where transformers logs what
    it opens, configurations are written out as ever.
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
