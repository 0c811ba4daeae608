"""
The wheel in a fresh environment, from a folder that has packages called app and core: the same
code, or the reason.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.stored import store_run

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

PACKAGES = ["adapters", "app", "core"]

BUILT_FROM = [*PACKAGES, "packplan.py", "pyproject.toml", "README.md", "LICENSE"]


def quietly(*command: object) -> None:
    run = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    assert 0 == run.returncode, run.stdout + run.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The project as a wheel, built from a copy: what an earlier build left would be in it."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in BUILT_FROM:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)
    quietly(
        sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index", "-w", folder, folder
    )
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def programs(wheel, tmp_path_factory) -> Path:
    """The programs of an environment with the wheel, and with this one's other packages."""
    folder = tmp_path_factory.mktemp("environment")
    quietly(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / "bin" / "python"
    # A line of a .pth adds a folder, and runs none of the .pth files in it: not that of an editable
    # install.
    own = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    (own / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    quietly(
        sys.executable, "-m", "pip", "--python", python, "install", "--no-compile", "--no-deps", "--no-index", wheel
    )
    return folder / "bin"


@pytest.fixture
def foreign(tmp_path) -> Path:
    """A folder with other packages of our names."""
    folder = tmp_path / "foreign"
    for name in ("app", "core"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text("raise RuntimeError('these are others')\n")
    return folder


def run(folder: Path, *command: object, **env: str) -> subprocess.CompletedProcess[str]:
    plain = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run(
        [*map(str, command)], cwd=folder, env=plain | env, capture_output=True, text=True, check=False
    )


def test_the_wheel_holds_every_file_of_the_packages(wheel):
    """Modules, YAMLs, the page and the tables; and nothing else but what says what it is."""
    ours = {
        str(path.relative_to(ROOT))
        for name in PACKAGES
        for path in (ROOT / name).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}

    assert ours | {"packplan.py"} == held


def test_it_runs_where_other_packages_have_its_names(programs, foreign, tmp_path):
    """With YAML and data elsewhere; ranks that torchrun starts, too."""
    path = store_run(tmp_path, world_sizes=(1,))
    shown = run(foreign, programs / "packplan", "plan", "show", path)
    launcher = [
        programs / "python",
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        2,
        "--no-python",
    ]
    of_ranks = run(foreign, *launcher, programs / "packplan", "plan", "show", path)

    assert (0, "") == (shown.returncode, shown.stderr)
    assert shown.stdout.startswith("train: ")
    assert 0 == of_ranks.returncode, of_ranks.stderr
    assert 2 == of_ranks.stdout.count(shown.stdout.splitlines()[-1])


POOL = """
import packplan, sys
import app.__main__

def measure():
    import adapters.lifeline, core
    with adapters.lifeline.ctrl_c_kept():
        found = adapters.lifeline.open_pool(1, print).submit(packplan.place, "core")
    print(found.result() == packplan.place("core"), packplan.place("core"))
    return 0

if __name__ == "__main__":
    app.__main__.main = measure
    sys.exit(packplan.main())
"""
"""Starts a process that measures from within the program."""


def test_processes_that_measure_find_the_same_code(programs, foreign, tmp_path):
    """Not the packages of the folder that the program was started in."""
    (tmp_path / "pool.py").write_text(POOL)
    ended = run(foreign, programs / "python", tmp_path / "pool.py")

    own = Path(sysconfig.get_path("purelib", vars={"base": str(programs.parent)}))
    assert (0, f"\nTrue {own / 'core'}\n") == (ended.returncode, ended.stdout), ended.stderr


@pytest.mark.parametrize("way", ["PYTHONPATH", "python -m"])
def test_packages_that_are_in_the_way_are_named(programs, foreign, way):
    """Status 2, with both folders and a remedy, and no traceback."""
    if way == "PYTHONPATH":
        ended = run(foreign, programs / "packplan", "plan", "show", "run.yaml", PYTHONPATH=str(foreign))
    else:
        ended = run(foreign, programs / "python", "-m", "packplan", "plan", "show", "run.yaml")

    assert 2 == ended.returncode
    assert f", but {foreign / 'app'} would be imported: " in ended.stderr
    assert 1 == ended.stderr.count("\n")
