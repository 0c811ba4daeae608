"""
Finds the folder of a model, and reads facts from its files without torch and ms-swift.

Models are found in the local caches of Hugging Face and ModelScope, without the hubs' libraries and
without a network. With `model.download: true`, ms-swift downloads missing models. The caches are
`HF_HUB_CACHE` (or `HF_HOME`/hub) and `MODELSCOPE_CACHE`, in each layout that the hub's library has
used. `USE_HF` decides which cache is searched first, as in ms-swift.
"""

import hashlib
import json
import os
import re
import zipfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from packplan.adapters.files import parse_json, read_text, wrap_load_errors
from packplan.core.config.run import ModelConfig
from packplan.core.errors import ConfigError, Fault, counted

_ID = re.compile(r"[\w.-]+/[\w.-]+")


PROCESSING_FILES = (
    "config.json", "tokenizer*", "vocab*", "merges*", "special_tokens*", "added_tokens*", "*processor_config.json",
    "chat_template*", "*.model", "*.py",
)  # fmt: skip
"""Patterns of a model's files that decide how records become tokens."""

_NUMBERED = re.compile(r"(.*?)\.(\d+)\.")
"""Pattern of a weight's name in a layer, with two groups: its prefix and the layer's number."""

_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
"""Names of weight files, in the order in which transformers looks for them."""

_ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")

_POINTER = b"version "
"""First bytes of a git-lfs pointer, which replaces a file that was not downloaded."""

_MOST_JSON = 2**28
"""Largest size in bytes of a model's JSON file; tokenizer files have tens of MiB."""

_SAMPLED, _MOST_SAMPLED = 256, 256
"""
Largest number of bytes that a digest reads from a weight, and largest number of weights that the
digest reads.
"""

_DIGITS = 12
"""Number of hexadecimal digits of a digest that a message shows."""


def is_hub_id(name: str) -> bool:
    """Return whether a name is a hub id `owner/name`, not an existing path."""
    return _ID.fullmatch(name) is not None and not name.startswith((".", "/")) and not Path(name).exists()


def find_cached_model(name: str) -> Path | None:
    """Return the cached folder of the hub id *name* (`owner/name`); None if no cache has it."""
    searches = (_hugging_face_folders, _modelscope_folders)
    for search in searches if prefers_hugging_face() else reversed(searches):
        for folder in search(name):
            if folder.is_dir() and any(folder.iterdir()):
                return folder
    return None


def find_model(name: str) -> Path:
    """
    Return the path of a model's folder, or of its config.json; ConfigError if neither exists.

    Args:
        name: Path of the folder or of the config.json, or the hub id of a cached model.
    """
    path = Path(name)
    if path.is_file() or (path / "config.json").is_file():
        return path
    folder = find_cached_model(name) if is_hub_id(name) else None
    if folder is None:
        how = "not a folder with a config.json: name such a folder"
        if is_hub_id(name):
            how = (
                f"neither a folder with a config.json nor in a local cache: download it with `{download_command(name)}`"
            )
        raise ConfigError.for_key("MODEL", f"is {name}, which is {how}")
    return folder


def prefers_hugging_face() -> bool:
    """Return whether Hugging Face comes before ModelScope; `USE_HF` decides, as in ms-swift."""
    return os.environ.get("USE_HF", "0").strip().lower() in {"1", "true", "yes", "y", "t", "on"}


def download_command(name: str) -> str:
    """Return the shell command that downloads the model *name* from the preferred hub."""
    return f"hf download {name}" if prefers_hugging_face() else f"modelscope download --model {name}"


def download_model(name: str) -> Path:
    """Download the model *name* with ms-swift, and return its folder; ConfigError on failure."""
    from swift.utils import safe_snapshot_download  # takes seconds to import

    with wrap_load_errors("model.model", f"is {name}, which cannot be downloaded", "check the name and the network"):
        return Path(safe_snapshot_download(name))


def _hugging_face_folders(name: str) -> Iterator[Path]:
    home = os.environ.get("HF_HOME") or str(Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()
    folder = cache / f"models--{name.replace('/', '--')}"
    main = folder / "refs" / "main"
    if main.is_file():
        yield folder / "snapshots" / main.read_text(encoding="utf-8").strip()
    yield from _newest_first(folder / "snapshots")


def _modelscope_folders(name: str) -> Iterator[Path]:
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
    """Return the folders of a model's cached revisions, the most recently changed first."""
    found = [folder for folder in snapshots.iterdir() if folder.is_dir()] if snapshots.is_dir() else []
    return sorted(found, key=lambda folder: folder.stat().st_mtime_ns, reverse=True)


def config_model_type(model: ModelConfig) -> str:
    """Return the `model_type` in a model's config.json; ConfigError if it cannot be read."""
    return str(config_content(model)["model_type"])


def model_faults(model: ModelConfig, *, loads: bool = False) -> tuple[Fault, ...]:
    """
    Return the faults of a model's configuration files, or else the first fault of its weights.

    Args:
        model: Section `model` of the run.
        loads: Whether the run loads the weights; if not, the weights are not checked.
    """
    try:
        config_content(model)
        if loads:
            require_whole_weights(model)
    except ConfigError as error:
        return error.faults
    return ()


def config_content(model: ModelConfig) -> Mapping[str, Any]:
    """
    Return the content of a model's config.json.

    Raises:
        ConfigError: The file cannot be read, or has no `model_type`. The error is also raised if
            generation_config.json in the same folder cannot be read, or has an end token that is
            not a token id.
    """
    path = Path(model.model) / "config.json"
    try:
        sizes: Mapping[str, Any] = parse_json(read_text(path))
        sizes["model_type"]
    except (ValueError, KeyError, TypeError):
        if is_hub_id(model.model):
            reason = (
                f"is {model.model}, which is neither a folder here nor in a local cache: download it with "
                f"`{download_command(model.model)}`, or set model.download: true"
            )
            raise ConfigError.for_key("model.model", reason) from None
        reason = f"is {model.model}, which is not a folder with a config.json that has a model_type: name such a folder"
        if (path.parent / "adapter_config.json").is_file():
            reason = f"is {model.model}, which has adapters only: merge the adapters into a model, and name its folder"
        raise ConfigError.for_key("model.model", reason) from None
    _require_end_tokens(path.with_name("generation_config.json"))
    return sizes


def _require_end_tokens(path: Path) -> None:
    """Refuse a generation_config.json that is damaged or whose end tokens are not token ids."""
    if not path.is_file():
        return
    try:
        content = parse_json(read_text(path))
    except ValueError as error:
        raise _damage_error(path, f"cannot be read ({error})", "copy it again") from None
    ends = content.get("eos_token_id") if isinstance(content, Mapping) else content
    if ends is not None and not all(type(end) is int for end in (ends if isinstance(ends, list) else [ends])):
        reason = f"has eos_token_id {str(ends)[:40]} in {path}, which is neither a token id nor a list of token ids"
        raise ConfigError.for_key("model.model", reason)


def config_architecture(model: ModelConfig) -> str:
    """
    Return the first architecture in a model's config.json, or the model type if there is none.
    """
    content = config_content(model)
    return str((content.get("architectures") or [content["model_type"]])[0])


def refuse_missing_layers(model: ModelConfig) -> None:
    """
    Refuse a config.json with more layers than the weights in the same folder.

    transformers only logs a warning, and trains the missing layers from random weights.

    Raises:
        ConfigError: Weights of a layer are missing.
    """
    sizes = config_content(model)
    sizes = sizes.get("thinker_config") or sizes
    part = sizes.get("text_config")
    configured = (part if isinstance(part, Mapping) else sizes).get("num_hidden_layers")
    layers: dict[str, set[int]] = {}
    for name in _weight_names(Path(model.model)):
        if found := _NUMBERED.match(name):
            layers.setdefault(found[1], set()).add(int(found[2]))
    found_layers = max(map(len, layers.values()), default=0)
    if isinstance(configured, int) and 0 < found_layers < configured:
        reason = (
            f"is {model.model}, whose config.json has {configured} layers (num_hidden_layers), but the weights have "
            f"{found_layers}: use the config.json that belongs to the weights"
        )
        raise ConfigError.for_key("model.model", reason)


def _first_file(folder: Path, names: Collection[str]) -> Path | None:
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _weight_names(folder: Path) -> Collection[str]:
    """Return the names of the weights in a folder's safetensors files; empty without such files."""
    path = _first_file(folder, _WEIGHTS[:2])
    if path is None:
        return ()
    return (_read_index(path) if path.suffix == ".json" else _read_header(path)).keys()


def require_whole_weights(model: ModelConfig) -> None:
    """
    Refuse weight files that are missing, truncated or damaged; only sizes and headers are read.

    Adapters in the folder are checked too. A folder without weights is accepted.

    Raises:
        ConfigError: A file is damaged or missing.
    """
    folder = Path(model.model)
    files = [path for path in (_first_file(folder, _WEIGHTS), _first_file(folder, _ADAPTERS)) if path is not None]
    for path in files:
        if path.suffix != ".json":
            _require_whole_file(path)
            continue
        named = _read_index(path)
        for name in sorted(set(named.values())):
            if not (folder / name).is_file():
                raise _damage_error(folder / name, f"is missing, although {path.name} names it")
            _require_whole_file(folder / name)


def _damage_error(path: Path, fact: str, remedy: str = "copy or download it again") -> ConfigError:
    return ConfigError.for_key("model.model", f"needs {path}, which {fact}: {remedy}")


def _read_json(path: Path) -> Any:
    try:
        return parse_json(read_text(path, most=_MOST_JSON))
    except ValueError as error:
        raise _damage_error(path, f"cannot be read ({error})") from error


def damaged_json_reason(folder: str) -> str:
    """Return a message about a folder's first damaged JSON file; empty if none is damaged."""
    for path in sorted(Path(folder).glob("*.json")):
        try:
            _read_json(path)
        except ConfigError as error:
            return f"it {error.faults[0].reason}"
    return ""


def _read_index(index: Path) -> Mapping[str, str]:
    """Return the file name of each weight, as listed in the index of split weight files."""
    content = _read_json(index)
    named = content.get("weight_map") if isinstance(content, dict) and "metadata" in content else None
    if not named or not isinstance(named, dict) or not all(isinstance(name, str) for name in named.values()):
        raise _damage_error(index, "is not an index of weights with metadata and a weight_map")
    return named


def _read_header(path: Path) -> Mapping[str, Any]:
    """Return a safetensors file's header, keyed by weight name; ConfigError if it is damaged."""
    import safetensors  # comes with transformers; runs are also planned without it

    try:
        with safetensors.safe_open(path, framework="numpy"):  # compares the header with the file's size
            pass
    except (OSError, safetensors.SafetensorError) as error:
        raise _damage_error(path, f"is truncated, or is not a weight file ({error})") from error
    with path.open("rb") as file:
        weights = dict(json.loads(file.read(int.from_bytes(file.read(8), "little"))))
    weights.pop("__metadata__", None)
    return weights


def _require_whole_file(path: Path) -> None:
    """Raise ConfigError if a file is truncated, is a git-lfs pointer or is not a weight file."""
    with path.open("rb") as file:
        start = file.read(8)
    if start == _POINTER:
        raise _damage_error(path, "is a pointer of git-lfs", "fetch it with git lfs pull")
    if path.suffix == ".safetensors":
        _read_header(path)
    # A torch archive ends with its table of contents. Older versions of torch wrote a pickle.
    elif not (zipfile.is_zipfile(path) or start.startswith(b"\x80")):
        raise _damage_error(path, "is truncated, or is not a weight file")


def config_digest(model: ModelConfig) -> str:
    """
    Return a digest of a model's config.json; ConfigError if that file cannot be used.

    With `model.trust_remote_code`, the digest also covers the Python files in the model's folder.
    """
    digest = hashlib.sha256(json.dumps(config_content(model), sort_keys=True).encode())
    if model.trust_remote_code:
        for file in sorted(Path(model.model).glob("*.py")):
            digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def model_file_facts(folder: Path, *, patterns: Sequence[str] = ("config.json",)) -> dict[str, str]:
    """
    Return the size and digest of each matching file as a text, keyed by `model.model NAME`.

    The result is empty if *folder* does not exist. Digests cover only a part of a weight file.

    Args:
        folder: Folder of the model.
        patterns: Patterns of file names to include in addition to the weights.
    """
    facts = {}
    for path in sorted({path for pattern in ("*.safetensors", "*.bin", *patterns) for path in folder.glob(pattern)}):
        is_weights = path.suffix in {".safetensors", ".bin"}
        digest = _weights_digest(path) if is_weights else hashlib.sha256(path.read_bytes()).hexdigest()
        facts[f"model.model {path.name}"] = f"{counted(path.stat().st_size, 'byte')}, {digest[:_DIGITS]}"
    return facts


def _weights_digest(path: Path) -> str:
    """
    Return a digest of a weight file.

    For a safetensors file, the digest covers the header and some bytes of the weights. For a torch
    archive, the digest covers the stored checksums. For any other file, it covers nothing.
    """
    digest = hashlib.sha256()
    if path.suffix == ".safetensors":
        weights = _read_header(path)
        digest.update(json.dumps(weights, sort_keys=True).encode())
        with path.open("rb") as file:
            start = 8 + int.from_bytes(file.read(8), "little")
            for weight in [*weights.values()][:: -(-len(weights) // _MOST_SAMPLED) or 1]:
                first, end = weight["data_offsets"]
                file.seek(start + max(first, (first + end - _SAMPLED) // 2))
                digest.update(file.read(min(_SAMPLED, end - first)))
    elif zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            digest.update(repr([(one.filename, one.file_size, one.CRC) for one in archive.infolist()]).encode())
    return digest.hexdigest()
