"""The built wheel, with three requirements, and beside other packages app and core."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.processes import ROOT
from tests.stored import store_run

pytestmark = pytest.mark.slow

LAYERS = ["adapters", "app", "core"]

BUILT_FROM = [*LAYERS, "packplan", "pyproject.toml", "README.md", "LICENSE"]

OTHERS = Path(sysconfig.get_path("purelib"))

REQUIRED = ["attr", "attrs", "binpacking", "numpy", "numpy.libs", "scipy", "scipy.libs"]
"""Folders of the packages that the bare package needs."""

SOURCES = """
import sys
from setuptools import build_meta
print(build_meta.build_sdist(sys.argv[1]))
"""


def quietly(*command: object, cwd: Path | None = None) -> None:
    run = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, cwd=cwd)
    assert 0 == run.returncode, run.stdout + run.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The project as a wheel, built from the source distribution of a copy."""
    folder, sources = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("sources")
    for name in BUILT_FROM:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, symlinks=True)
        else:
            shutil.copy(ROOT / name, folder / name)
    quietly(sys.executable, "-c", SOURCES, sources, cwd=folder)
    (archive,) = sources.glob("*.tar.gz")
    pip = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index"]
    quietly(*pip, "-w", sources, archive)
    (built,) = sources.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def programs(wheel, tmp_path_factory) -> Path:
    """The programs of an environment with the wheel and the packages that it requires."""
    folder = tmp_path_factory.mktemp("environment")
    quietly(sys.executable, "-m", "venv", "--without-pip", folder)
    install = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "--no-compile"]
    quietly(*install, "--no-deps", "--no-index", wheel)
    for name in REQUIRED:
        Path(sysconfig.get_path("purelib", vars={"base": str(folder)}), name).symlink_to(OTHERS / name)
    return folder / "bin"


def run(folder: Path, *command: object, beside: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command in a folder, beside the packages of another one."""
    own = {**os.environ, "PYTHONPATH": beside}
    return subprocess.run([*map(str, command)], cwd=folder, env=own, capture_output=True, text=True, check=False)


def test_the_wheel_holds_every_file_of_the_package(wheel):
    """Modules, YAMLs, the page and the tables, all below one name; and what says what it is."""
    own = {f"packplan/{path.name}" for path in (ROOT / "packplan").iterdir() if path.is_file()}
    linked = {
        f"packplan/{path.relative_to(ROOT)}"
        for name in LAYERS
        for path in (ROOT / name).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}

    assert own | linked == held


def test_it_runs_where_other_packages_are_called_app_and_core(programs, tmp_path):
    """With YAML and data elsewhere; as a module, too, which is how torchrun starts a rank."""
    path, foreign = store_run(tmp_path, world_sizes=(1,)), tmp_path / "foreign"
    for name in ("app", "core"):
        (foreign / name).mkdir(parents=True)
        (foreign / name / "__init__.py").write_text("raise RuntimeError('these are others')\n")
    for start in ([programs / "packplan"], [programs / "python", "-m", "packplan"]):
        shown = run(foreign, *start, "plan", "show", path, beside=str(OTHERS))
        assert (0, "") == (shown.returncode, shown.stderr)
        assert shown.stdout.startswith("train:")


LIBRARY = """
import packplan
plan = packplan.build_raw_plan([60, 20, 50, 30, 40, 40], packing_length=80)
aligned = packplan.align_plan(plan, world_size=2, dataloader_drop_last=False)
schedule = packplan.EpochSchedule
print(plan.packs.tolist(), aligned.repeated, [getattr(packplan, name).__name__ for name in ("pack", "shard_packed")])
assert all(getattr(packplan, name) is not None for name in packplan.__all__)
try:
    import packplan.hf
except ModuleNotFoundError as error:
    print(error)
"""


def test_three_requirements_plan_a_list(programs, tmp_path):
    """All names load, without torch, YAML or a file; `packplan.hf` names its extra."""
    ended = run(tmp_path, programs / "python", "-c", LIBRARY)

    assert "" == ended.stderr
    printed, missing = ended.stdout.splitlines()
    assert (0, "[[0, 1], [2, 3], [4, 5]] (0,) ['pack', 'shard_packed']") == (ended.returncode, printed), ended
    assert "packplan.hf needs torch: pip install 'packplan[hf]'" == missing


@pytest.mark.parametrize("command", ["sft", "plan", "check", "rl"])
def test_a_command_whose_extra_is_missing_names_it(programs, tmp_path, command):
    words = {"plan": ["show", "run.yaml"]}.get(command, ["run.yaml"])
    ended = run(tmp_path, programs / "packplan", command, *words)

    assert 2 == ended.returncode, ended.stderr
    assert ended.stderr.startswith("error: this command needs the package ")
    assert ended.stderr.endswith(": pip install 'packplan[train]'\n")
    assert 1 == ended.stderr.count("\n")
