"""`packplan COMMAND …` is the command's module, loaded when it is called."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from app.__main__ import COMMANDS, main

ROOT = Path(__file__).parents[2]


def helped(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--help"])
    assert 0 == ended.value.code
    return capsys.readouterr().out


@pytest.mark.slow
def test_help_names_every_command_and_loads_none():
    """Neither torch, swift, transformers nor numpy, nor any command's module."""
    heavy = ["torch", "swift", "transformers", "numpy", *(module for module, _ in COMMANDS.values())]
    script = f"""if True:
        import sys
        from app.__main__ import main
        try:
            main(["--help"])
        finally:
            print([name for name in {heavy} if name in sys.modules])
    """
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=ROOT)

    assert 0 == run.returncode
    assert "[]" == run.stdout.splitlines()[-1]
    assert all(f"\n  {name:<8}{does}\n" in run.stdout for name, (_, does) in COMMANDS.items())


@pytest.mark.parametrize("arguments", [[], ["trian"], ["--verbose", "sft"]])
def test_what_is_no_command_is_refused_with_what_there_is(capsys, arguments):
    """Exit status 2."""
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
    monkeypatch.setitem(sys.modules, "app.sft", stand_in)

    assert status == main(["sft", "run.yaml", "--help", "--verbose"])
    assert [["run.yaml", "--help", "--verbose"]] == seen


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_module(name):
    """Packages of the same name are refused."""
    module, _ = COMMANDS[name]

    assert f"app.{name}" == module.removesuffix(".__main__")
    assert find_spec(module) is not None


def test_the_package_installs_the_command():
    """Under the name by which help recognises it."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]

    assert {"packplan": "packplan:main"} == scripts


@pytest.mark.parametrize("name", ["sft", "check", "rl", "bench", "demo"])
def test_help_calls_a_command_as_it_was_started(capsys, monkeypatch, name):
    """By `packplan`, or as a module."""
    monkeypatch.setattr(sys, "argv", ["/usr/local/bin/packplan", name])
    assert helped(capsys, name).startswith(f"usage: packplan {name} ")

    monkeypatch.setattr(sys, "argv", [import_module(COMMANDS[name][0]).__file__])
    assert helped(capsys, name).startswith(f"usage: python -m app.{name} ")
