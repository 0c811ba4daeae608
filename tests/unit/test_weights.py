"""Weights that are cut off, missing or invalid are named before libraries are imported."""

import io
import json
import struct
import zipfile

import pytest
import yaml

from packplan.app.opening.runs import read_config, require_inputs
from packplan.core.errors import ConfigError
from tests.documents import document
from tests.records import write_lines

_WHOLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_SHARD = "model-00002-of-00002.safetensors"


def safetensors(*names: str) -> bytes:
    """Return a file of weights of 16 bytes each."""
    described = {
        name: {"dtype": "F32", "shape": [4], "data_offsets": [16 * at, 16 * at + 16]} for at, name in enumerate(names)
    }
    header = json.dumps({"__metadata__": {"format": "pt"}, **described}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(16 * len(names))


def archive() -> bytes:
    """Return a file as torch saves weights, as far as its outside shows."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as file:
        file.writestr("archive/data.pkl", b"weights")
    return content.getvalue()


def index(suffix: str = "safetensors") -> bytes:
    """Return the index of two shards."""
    stem = "model" if suffix == "safetensors" else "pytorch_model"
    shards = {f"w{n}": f"{stem}-0000{n}-of-00002.{suffix}" for n in (1, 2)}
    return json.dumps({"metadata": {"total_size": 32}, "weight_map": shards}).encode()


SHARDED = {_INDEX: index(), "model-00001-of-00002.safetensors": safetensors("w1"), _SHARD: safetensors("w2")}
BINS = {
    "pytorch_model.bin.index.json": index("bin"),
    "pytorch_model-00001-of-00002.bin": archive(),
    "pytorch_model-00002-of-00002.bin": archive(),
}


@pytest.fixture
def faults_of(tmp_path):
    """Return a function that writes a model's folder and returns the faults of its weights."""
    data = write_lines(tmp_path / "data.jsonl", [{"query": "say", "response": "blue"}])
    run = document({"model.model": str(tmp_path / "model"), "custom.train_jsonl": str(data)}, output_dir="run")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    (tmp_path / "model").mkdir()
    config = read_config(tmp_path / "run.yaml")

    def faults(files: dict[str, bytes]) -> list[str]:
        for file in (tmp_path / "model").iterdir():
            file.unlink()
        for name, content in {"config.json": b'{"model_type": "qwen2"}', **files}.items():
            (tmp_path / "model" / name).write_bytes(content)
        require_inputs(config)  # a plan needs no weights
        try:
            require_inputs(config, loads=True)
        except ConfigError as error:
            return [str(fault).replace(f"{tmp_path}/model/", "") for fault in error.faults]
        return []

    return faults


ONE = {_WHOLE: safetensors("w1")}


@pytest.mark.parametrize(
    ("files", "torn"),
    [
        *((files, None) for files in ({}, {_WHOLE: safetensors()}, {"pytorch_model.bin": archive()}, BINS)),
        (ONE | {_INDEX: b"of shards that are gone"}, None),  # what transformers does not read may be anything
        ({"pytorch_model.bin": b"\x80\x02 a pickle of torch before 1.6"}, None),
        (ONE | {"adapter_config.json": b"{}", "adapter_model.safetensors": safetensors("a")}, None),
        ({_WHOLE: safetensors("w1", "w2")}, _WHOLE),
        (SHARDED, _SHARD),
        (SHARDED | {"adapter_model.safetensors": safetensors("a")}, "adapter_model.safetensors"),
    ],
)
def test_a_file_cut_off_anywhere_is_named_and_whole_ones_and_none_are_not(faults_of, files, torn):
    """Whatever is left of it, with what to do."""
    assert [] == faults_of(files)
    for size in range(len(files[torn]) if torn else 0):
        (fault,) = faults_of({**files, torn: files[torn][:size]})
        assert fault.startswith(f"model.model needs {torn}, which is truncated, or is not a weight file")
        assert fault.endswith(": copy or download it again")


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({_WHOLE: ONE[_WHOLE] + b"more"}, f"{_WHOLE}, which is truncated, or is not a weight file"),
        ({_WHOLE: struct.pack("<Q", 10) + b'{"w": [1]}'}, f"{_WHOLE}, which is truncated, or is not a weight file"),
        ({_WHOLE: b"version https://git-lfs.github.com/spec/v1\n"}, f"{_WHOLE}, which is a pointer of git-lfs: "),
        ({**SHARDED, _INDEX: index()[:40]}, f"{_INDEX}, which cannot be read ("),
        (
            {**SHARDED, _INDEX: b'{"metadata": {}, "weight_map": {"w1": 1}}'},
            f"{_INDEX}, which is not an index of weights",
        ),
        ({_INDEX: index()}, f"model-00001-of-00002.safetensors, which is missing, although {_INDEX} names it: copy"),
        ({"pytorch_model.bin": archive()[:-30]}, "pytorch_model.bin, which is truncated, or is not a weight file"),
        ({**BINS, "pytorch_model-00002-of-00002.bin": b"PK"}, "pytorch_model-00002-of-00002.bin, which is truncated"),
    ],
)
def test_what_is_no_weights_is_named(faults_of, files, says):
    """The file and why."""
    (fault,) = faults_of(files)

    assert fault.startswith(f"model.model needs {says}")


def test_a_folder_of_adapters_alone_is_no_model(tmp_path, faults_of):
    """It says what to do with them, where a checkpoint of a run is taken for one."""
    faults_of({})
    (tmp_path / "model" / "config.json").unlink()
    (tmp_path / "model" / "adapter_config.json").write_text("{}")

    with pytest.raises(ConfigError, match="has adapters"):
        require_inputs(read_config(tmp_path / "run.yaml"))
