"""Prompts are those that ms-swift's own arguments give."""

import pytest

from packplan.app.wiring.runs import read_config
from packplan.core.errors import ConfigError
from tests.e2e.test_swift_shapes import compare, dialogue, template_of_swift
from tests.records import chat

ASKED = chat(*dialogue("why?", "so.", "and?", "also."))


@pytest.mark.parametrize(("system", "text"), [("sys.txt", "Look,\nagain\\n."), (r"Look\nagain.", "Look\nagain.")])
def test_a_system_prompt_is_read_as_ms_swift_reads_it(system, text, open_source, tmp_path, monkeypatch):
    """A text file by its name, which enters the fingerprint, and a line break as two characters."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sys.txt").write_text("Look,\nagain\\n.")
    source, encoder = open_source([ASKED], "qwen2", system=system)

    assert text == encoder.config.template.system
    compare(encoder, 0, ASKED, template_of_swift(encoder, system=system))
    (tmp_path / "sys.txt").write_text("Look away.")
    changed = open_source([ASKED], "qwen2", system=system)[0].fingerprint() != source.fingerprint()
    assert changed == system.endswith(".txt")


def test_a_system_prompt_that_is_no_file_is_refused(write_run):
    path = write_run("qwen2", template={"system": "gone.txt"})
    with pytest.raises(ConfigError, match=r"template\.system: gone\.txt cannot be read"):
        read_config(path)
