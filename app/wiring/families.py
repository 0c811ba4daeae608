"""Builds what asks families of models whether they may pack; it needs torch, and not ms-swift."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.metadata import version

from packplan.adapters.probe.families import family_names, probe_family
from packplan.core.equality import PackingVerdict
from packplan.core.errors import ConfigError

PACKAGES = ("torch", "transformers")


def verdicts(names: Sequence[str]) -> Iterator[PackingVerdict]:
    """
    Yield the verdict on each family, or on all that transformers knows if none is named.

    Raises:
        ConfigError: It does not know one of them.
    """
    known = family_names()
    if unknown := sorted(set(names) - set(known)):
        reason = f"names {', '.join(unknown)}, which transformers {version('transformers')} does not know: it has "
        near = ", ".join(known[:10])
        raise ConfigError.of("--families", f"{reason}{near} and {len(known) - 10} others")
    for name in names or known:
        yield probe_family(name)


def versions(*, swift: bool = False) -> dict[str, str]:
    """Return the versions that verdicts hold for; *swift* adds that of ms-swift."""
    return {name: version(name) for name in (*PACKAGES, *(("ms-swift",) if swift else ()))}


def templates_that_pack() -> list[str]:
    """Return the templates of models that see, which ms-swift declares to pack."""
    from packplan.adapters.samples import template

    return template.templates_that_pack()
