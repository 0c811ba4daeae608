"""The folder of a model that is named on a command line, found without torch."""

from pathlib import Path

from packplan.adapters.model_folder import download_command, find_cached, is_id
from packplan.core.errors import ConfigError, Fault


def model_path(name: str) -> Path:
    """
    Return the folder or config.json of a model, by path or by an id in a local cache; ConfigError.
    """
    path = Path(name)
    if path.is_file() or (path / "config.json").is_file():
        return path
    folder = find_cached(name) if is_id(name) else None
    if folder is not None:
        return folder
    reason = f"{name} is no folder with a config.json, and no config.json"
    if is_id(name):
        reason = f"{name} is no folder here, and no local cache holds it: download it with `{download_command(name)}`"
    raise ConfigError("packplan probe", (Fault("MODEL", reason),))
