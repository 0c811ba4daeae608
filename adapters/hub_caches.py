"""
Models and data in the local caches of Hugging Face and ModelScope, found without their libraries
and without a network.

Caches lie at `HF_HUB_CACHE`, else `HF_HOME`/hub, and at `MODELSCOPE_CACHE`, in each layout that its
library has used. `USE_HF` decides which cache comes first, as for ms-swift.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["model", "dataset"]

_ID = re.compile(r"[\w.-]+/[\w.-]+")


def is_id(name: str) -> bool:
    """Return whether a name can be a hub id: `owner/name`, and no local path."""
    return _ID.fullmatch(name) is not None and not name.startswith((".", "/")) and not Path(name).exists()


def cached(name: str, kind: Kind, *, hub: str | None = None) -> Path | None:
    """
    Return the folder of a model or data set in a local cache, or None.

    Args:
        name: Hub id, `owner/name`.
        kind: Model or data set.
        hub: `hf` or `ms` for the cache of one hub; None for both.
    """
    searches = {"hf": _hugging_face, "ms": _modelscope}
    first = "hf" if prefers_hugging_face() else "ms"
    for searched in [hub] if hub else [first, *(searches.keys() - {first})]:
        for folder in searches[searched](name, kind):
            if folder.is_dir() and any(folder.iterdir()):
                return folder
    return None


def prefers_hugging_face() -> bool:
    """Return whether Hugging Face comes first, by `USE_HF` as ms-swift reads it."""
    return os.environ.get("USE_HF", "0").strip().lower() in {"1", "true", "yes", "y", "t", "on"}


def download_command(name: str, kind: Kind, *, hub: str | None = None) -> str:
    """
    Return the command that downloads a model or data set into its hub's cache.

    Args:
        name: Hub id, `owner/name`.
        kind: Model or data set.
        hub: `hf` or `ms`; None for the hub that comes first.
    """
    if hub == "hf" or (hub is None and prefers_hugging_face()):
        return f"hf download {name}" + (" --repo-type dataset" if kind == "dataset" else "")
    return f"modelscope download --{kind} {name}"


def _hugging_face(name: str, kind: Kind) -> Iterator[Path]:
    home = os.environ.get("HF_HOME") or str(Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()
    folder = cache / f"{kind}s--{name.replace('/', '--')}"
    main = folder / "refs" / "main"
    if main.is_file():
        yield folder / "snapshots" / main.read_text(encoding="utf-8").strip()
    yield from _newest_first(folder / "snapshots")


def _modelscope(name: str, kind: Kind) -> Iterator[Path]:
    cache = Path(os.environ.get("MODELSCOPE_CACHE") or "~/.cache/modelscope").expanduser()
    owner, _, last = name.partition("/")
    escaped = last.replace(".", "___")
    for base in (cache, cache / "hub"):
        snapshots = base / f"{kind}s" / f"{owner}--{last}" / "snapshots"
        yield from (snapshots / "master", snapshots / "main")
        yield from _newest_first(snapshots)
        for folder in dict.fromkeys((escaped, last)):
            yield base / f"{kind}s" / owner / folder
            if kind == "model":
                yield base / owner / folder


def _newest_first(snapshots: Path) -> list[Path]:
    """Return the revisions of a cache, the latest first."""
    found = [folder for folder in snapshots.iterdir() if folder.is_dir()] if snapshots.is_dir() else []
    return sorted(found, key=lambda folder: folder.stat().st_mtime_ns, reverse=True)
