"""
Models in the local caches of Hugging Face and ModelScope, found without their libraries and without
a network; or downloaded by ms-swift, if that is asked for.

Caches lie at `HF_HUB_CACHE`, else `HF_HOME`/hub, and at `MODELSCOPE_CACHE`, in each layout that its
library has used. `USE_HF` decides which cache comes first, as for ms-swift.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from packplan.adapters.files import loading

_ID = re.compile(r"[\w.-]+/[\w.-]+")


def is_id(name: str) -> bool:
    """Return whether a name can be a hub id: `owner/name`, and no local path."""
    return _ID.fullmatch(name) is not None and not name.startswith((".", "/")) and not Path(name).exists()


def cached(name: str) -> Path | None:
    """Return the folder of a model, by its hub id `owner/name`, in a local cache; None without."""
    searches = (_hugging_face, _modelscope) if prefers_hugging_face() else (_modelscope, _hugging_face)
    for search in searches:
        for folder in search(name):
            if folder.is_dir() and any(folder.iterdir()):
                return folder
    return None


def prefers_hugging_face() -> bool:
    """Return whether Hugging Face comes first, by `USE_HF` as ms-swift reads it."""
    return os.environ.get("USE_HF", "0").strip().lower() in {"1", "true", "yes", "y", "t", "on"}


def download_command(name: str) -> str:
    """Return the command that downloads a model, by its hub id, into the first hub's cache."""
    return f"hf download {name}" if prefers_hugging_face() else f"modelscope download --model {name}"


def download_model(name: str) -> Path:
    """Return the folder of a model that ms-swift downloads; ConfigError if it cannot."""
    from swift.utils import safe_snapshot_download  # takes seconds to import

    with loading("model.model", f"{name} cannot be downloaded"):
        return Path(safe_snapshot_download(name))


def _hugging_face(name: str) -> Iterator[Path]:
    home = os.environ.get("HF_HOME") or str(Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()
    folder = cache / f"models--{name.replace('/', '--')}"
    main = folder / "refs" / "main"
    if main.is_file():
        yield folder / "snapshots" / main.read_text(encoding="utf-8").strip()
    yield from _newest_first(folder / "snapshots")


def _modelscope(name: str) -> Iterator[Path]:
    cache = Path(os.environ.get("MODELSCOPE_CACHE") or "~/.cache/modelscope").expanduser()
    owner, _, last = name.partition("/")
    escaped = last.replace(".", "___")
    for base in (cache, cache / "hub"):
        snapshots = base / "models" / f"{owner}--{last}" / "snapshots"
        yield from (snapshots / "master", snapshots / "main")
        yield from _newest_first(snapshots)
        for folder in dict.fromkeys((escaped, last)):
            yield base / "models" / owner / folder
            yield base / owner / folder


def _newest_first(snapshots: Path) -> list[Path]:
    """Return the revisions of a cache, the latest first."""
    found = [folder for folder in snapshots.iterdir() if folder.is_dir()] if snapshots.is_dir() else []
    return sorted(found, key=lambda folder: folder.stat().st_mtime_ns, reverse=True)
