"""`packplan COMMAND …` is the command's module, loaded when it is called."""

import ast
import errno
import subprocess
import sys
from importlib import import_module
from types import SimpleNamespace

import pytest

import packplan
from packplan.adapters import files
from packplan.app.__main__ import COMMANDS, main
from packplan.app.cli import command
from tests.processes import ROOT
from tests.stored import store_run


@pytest.mark.parametrize("arguments", [[], ["trian"], ["--verbose", "sft"]])
def test_what_is_no_command_is_refused_with_what_there_is(capsys, arguments):
    with pytest.raises(SystemExit) as ended:
        main(arguments)

    assert 2 == ended.value.code
    said = capsys.readouterr().err
    assert all(name in said for name in COMMANDS)


@pytest.mark.parametrize("status", [0, 2, 3, 130])
def test_arguments_and_exit_status_pass_through(monkeypatch, status):
    """Also options that `packplan` has itself."""
    seen = []
    stand_in = SimpleNamespace(main=lambda arguments: seen.append(arguments) or status)
    monkeypatch.setitem(sys.modules, "packplan.app.sft", stand_in)

    assert status == main(["sft", "run.yaml", "--help", "--verbose"])
    assert [["run.yaml", "--help", "--verbose"]] == seen


@pytest.mark.parametrize("name", COMMANDS)
def test_help_calls_a_command_by_its_one_name(capsys, name):
    """Whatever started it; its module has the same name."""
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])

    assert 0 == ended.value.code
    assert capsys.readouterr().out.startswith(f"usage: packplan {name} ")
    assert f"packplan.app.{name}" == COMMANDS[name][0].removesuffix(".__main__")


def test_a_limit_of_open_files_is_raised_or_named(monkeypatch, capsys):
    """As far as the machine allows; where that is too little, nothing is begun."""
    limits, begun = [(300, 1024)], []
    monkeypatch.setattr(command.resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(command.resource, "setrlimit", lambda _, limit: limits.append(limit))

    assert 0 == command.run_command(lambda: begun.append(1), verbose=False)
    assert (1024, 1024) == limits[-1]
    limits.append((24, 24))
    assert 2 == command.run_command(lambda: begun.append(1), verbose=False)

    assert [1] == begun
    assert "may open only 24 files here, and 256 are needed: raise the limit of open files" in capsys.readouterr().err


def test_too_many_open_files_are_no_full_disk(monkeypatch, capsys, tmp_path):
    """Also while a file is written."""

    def open_too_many():
        with files.wrap_write_errors(tmp_path):
            raise OSError(errno.EMFILE, "Too many open files")

    assert 2 == command.run_command(open_too_many, verbose=False)
    assert "error: Too many open files: raise the limit of open files with ulimit -n" in capsys.readouterr().err


CHECKOUT = """
import os, runpy, sys
sys.argv = ["plan", "show", sys.argv[1]]
try:
    runpy.run_module("app.plan", run_name="__main__", alter_sys=True)
finally:
    files = [os.path.realpath(getattr(module, "__file__", "") or "") for module in set(sys.modules.values())]
    own = [file for file in files if file.startswith(os.getcwd() + "/")]
    print(len(own) > 50, len(own) == len(set(own)))
    import core.plan, adapters.stores.plans, app.sft
    import packplan.core.plan, packplan.adapters.stores.plans, packplan.app.sft
    print(core.plan.RawPlan is packplan.core.plan.RawPlan, app.sft is packplan.app.sft)
    print(core.plan.__name__, core.plan.__spec__.name, core is packplan.core)
"""


@pytest.mark.slow
def test_the_folders_of_a_checkout_are_the_installed_packages(tmp_path):
    """`python -m app.plan` takes every module once; `core.plan` is `packplan.core.plan`."""
    path = store_run(tmp_path, world_sizes=(1,))
    run = subprocess.run([sys.executable, "-c", CHECKOUT, path], capture_output=True, text=True, check=False, cwd=ROOT)

    said = ["True True", "True True", "packplan.core.plan packplan.core.plan True"]
    assert said == run.stdout.splitlines()[-3:], run.stderr


def test_type_checkers_see_the_library_as_it_is_loaded():
    """The imports for types are the names that load, each from the same module."""
    tree = ast.parse((ROOT / "packplan" / "__init__.py").read_text())
    typed = {
        alias.asname: node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names
        if alias.asname
    }  # fmt: skip

    assert sorted(typed) == packplan.__all__
    for name, module in typed.items():
        assert getattr(import_module(module), name) is getattr(packplan, name)
    with pytest.raises(AttributeError, match="'packplan' has no attribute 'pakc'"):
        _ = packplan.pakc
