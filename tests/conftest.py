"""Profiles of hypothesis, and fixtures of every folder: the demo's data, RL runs, processes."""

import atexit
import collections
import functools
import gc
import importlib.metadata
import importlib.util
import itertools
import logging
import os
import pkgutil
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, settings

import packplan.core
from tests.processes import Server, fork_server

# transformers, TRL and others each read which packages there are, for 0.3 s.
importlib.metadata.packages_distributions = functools.cache(importlib.metadata.packages_distributions)
# No test reaches for a hub or a network.
os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
# Ray asks for a token from its first start on, which a process forked after it was imported lacks.
# Its workers would yield to all other processes.
os.environ.update(RAY_AUTH_MODE="disabled", RAY_worker_niceness="0")
# DeepSpeed asks torch for a GPU unless it is told.
os.environ.update(DS_ACCELERATOR="cpu")

# See `verdicts.py`; workers of pytest-xdist have the folder of the process that starts them.
if "VERDICTS_OF_TESTS" not in os.environ:
    os.environ["VERDICTS_OF_TESTS"] = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, os.environ["VERDICTS_OF_TESTS"])

# The same examples on every machine; what is random is `make explore`, which says how to reproduce
# what it finds.
_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "database": None, "print_blob": True}
settings.register_profile("repeatable", max_examples=25, derandomize=True, **_COMMON)
settings.register_profile("explore", max_examples=500, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

TRACED_EXAMPLES = 10
"""Examples of a law that are traced: the others meet hardly a new line of core."""


def _coverage(config):
    """Return what pauses and resumes coverage, or None."""
    return getattr(config.pluginmanager.get_plugin("_cov"), "cov_controller", None)


def import_core(config):
    """Trace core as it is imported, and nothing else."""
    if controller := _coverage(config):
        for module in pkgutil.walk_packages(packplan.core.__path__, "packplan.core."):
            importlib.import_module(module.name)
        controller.pause()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session):
    """Stop the coverage that pytest-cov starts in a worker of xdist, beneath the worker's own."""
    controller = _coverage(session.config)
    if controller and hasattr(session.config, "workerinput"):
        controller.pause()


@pytest.hookimpl(wrapper=True)
def pytest_collection(session):
    """The million objects of libraries are no garbage."""
    import_core(session.config)
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(items):
    """Put files with many slow tests first, so that no worker waits for another at the end."""
    slow = collections.Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[item.path])


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session):
    """Fork the server of processes from the process that has collected the tests."""
    gc.freeze()
    if any("server" in getattr(item, "fixturenames", ()) for item in getattr(session, "items", ())):
        if importlib.util.find_spec("swift"):
            importlib.import_module("tests.stack")
        fork_server()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Trace core in the first examples of its laws: elsewhere, that adds no line."""
    controller, marks = _coverage(item.config), {mark.name for mark in item.iter_markers()}
    is_elsewhere = item.path.parent.name not in {"laws", "unit"} and "covers" not in marks
    if not controller or is_elsewhere or "untraced" in marks:
        return (yield)
    controller.resume()
    if law := getattr(item.obj, "hypothesis", None):
        plain, number = law.inner_test, itertools.count()

        @functools.wraps(plain)  # hypothesis draws by the source of what it calls
        def traced_at_first(*args, **kwargs):
            if next(number) == TRACED_EXAMPLES:
                controller.pause()
            return plain(*args, **kwargs)

        law.inner_test = traced_at_first
    try:
        return (yield)
    finally:
        if law:
            law.inner_test = plain
        controller.pause()


@pytest.fixture(autouse=True)
def _loggers():
    """Give the project's logger back as it was: a command sets it up for its whole process."""
    if shown := sys.modules.get("packplan.adapters.progress"):
        shown.hide(hidden=False)
    logger = logging.getLogger("packplan")
    handlers, level, propagate = list(logger.handlers), logger.level, logger.propagate
    # A fixture of a whole module may have run a command before this one.
    logger.handlers, logger.propagate = [], True
    logger.setLevel(logging.NOTSET)
    yield
    logger.handlers, logger.propagate = handlers, propagate
    logger.setLevel(level)


@pytest.fixture(scope="session")
def demo(tmp_path_factory) -> Path:
    """A folder with `data/` and `models/`, made once."""
    from tools.demo.__main__ import make

    folder = tmp_path_factory.mktemp("demo")
    make(folder, seed=0, num_train=40, num_val=9)
    return folder


@pytest.fixture
def write_rl(demo, tmp_path):
    """Return a function that writes a run of reinforcement learning over the words to repeat."""

    def write(name="rl", *, policy=None, data="repeat.jsonl", model="qwen2", reward="character_overlap", **grpo):
        path, folder = tmp_path / f"{name}.yaml", tmp_path / name
        keys = {
            "output_dir": str(folder), "reward_funcs": f"packplan.app.rewards:{reward}", "max_steps": 2,
            "per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 8,
            "learning_rate": 1e-2, "logging_steps": 1, "lr_scheduler_type": "constant", **grpo,
        }  # fmt: skip
        model, data = {"model": str(demo / "models" / model)}, {"train_jsonl": str(demo / "data" / data)}
        path.write_text(yaml.safe_dump({"model": model, "custom": data, "policy": policy or {}, "grpo": keys}))
        return path

    return write


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """Return what starts processes with the stack imported; those left at the end are killed."""
    started = Server(tmp_path_factory.mktemp("processes"))
    yield started
    started.kill()


@pytest.fixture(scope="module")
def ray_folder():
    """Let a cluster of Ray have a folder of its own, since two in one would meet; return it."""
    # Sockets allow no long path.
    folder = tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True)
    with folder as name, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", name)
        yield Path(name)


@pytest.fixture
def small_disk(tmp_path):
    """Return a function that mounts a disk of so many bytes; skip where this is not allowed."""
    folder = tmp_path / "disk"

    def mount(size: int) -> Path:
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("a disk of its own cannot be mounted")
        return folder

    yield mount
    gc.collect()  # a run that failed is garbage, and maps what it stored
    subprocess.run(["umount", str(folder)], check=folder.is_mount())
