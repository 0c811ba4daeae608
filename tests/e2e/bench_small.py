"""Benchmarks on less than users run them on: the function that processes of the server call."""

from unittest.mock import patch

from benchmarks.__main__ import main

AT_ONCE = 4
"""Samples that are measured at once, so that as many are enough to warm up."""


def run(*words: str) -> int:
    """Run a benchmark on smaller photographs, few samples at once, and a small tokenizer."""
    from benchmarks import beside, measuring, slope
    from packplan.adapters.samples import measurer

    number, (width, height) = measuring.KINDS["photograph"]
    kinds = {**measuring.KINDS, "photograph": (number, (width // 2, height // 2))}
    with (
        patch.object(measuring, "KINDS", kinds),
        patch.object(measuring, "AT_ONCE", AT_ONCE),
        patch.object(measuring, "VOCABULARY", 1000),
        patch.object(beside, "VOCABULARY", 1000),
        patch.object(slope, "VOCABULARY", 1000),
        patch.object(beside, "AT_ONCE", AT_ONCE),
        patch.object(beside, "ROUNDS", 1),
        patch.object(measurer, "AT_ONCE", AT_ONCE),
    ):
        return main(list(words))
