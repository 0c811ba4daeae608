"""A process that probes each model once: a probe takes as long as the rest of a case."""

from typing import Any

from packplan.adapters.hf import unpad

_PROBE = unpad.probe_small_copy

_VERDICTS: dict[tuple[object, ...], Any] = {}


def keep_verdicts() -> None:
    """From here on, let `unpad` and `use_plan` keep the verdict on each model in this process."""
    unpad.probe_small_copy = _probe_once


def _probe_once(config: Any, **options: Any) -> Any:
    key = (type(config), config.to_json_string(use_diff=False), *sorted(options.items()))
    if key not in _VERDICTS:
        _VERDICTS[key] = _PROBE(config, **options)
    return _VERDICTS[key]
