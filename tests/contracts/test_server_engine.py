"""An engine behind a server gives the tokens of its text, says what it lost, and why it failed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from packplan.adapters.ranks.torch_group import OneRank
from packplan.adapters.workers.server import ServerEngine
from packplan.core.errors import ConfigError
from tests.processes import lives

pytestmark = pytest.mark.slow

SERVER = Path(__file__).with_name("openai_server.py")

COMMAND = f"{sys.executable} -S {SERVER} {{folder}} {{port}}"

END, BEGIN = 1, 2


class CharacterTokenizer:
    """A token is a character, and every text begins with a token of its own."""

    bos_token, eos_token_id = "^", END

    def decode(self, tokens, **_):
        """Return the text; the first token too has one, and END has none that is read as it."""
        return "".join({BEGIN: "^", END: "$"}.get(token, chr(token)) for token in tokens)

    def __call__(self, text, *, add_special_tokens=True):
        """Return the tokens of a text."""
        return {"input_ids": [BEGIN] * add_special_tokens + [ord(character) for character in text]}


def tokens_of(text):
    """Return a text's tokens, as a prompt."""
    return CharacterTokenizer()(text)["input_ids"]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """Return an engine of version 3, from the folder `weights-3`."""
    folder = tmp_path_factory.mktemp("engine") / "weights-3"
    folder.mkdir()
    engine = ServerEngine(COMMAND, tokenizer=CharacterTokenizer(), group=OneRank())
    engine.update(3, str(folder))
    yield engine
    engine.close()


def complete(engine, *texts, keys=None, temperature=0.5, max_new_tokens=9):
    """Return answers as texts with `$` at their end, and whether they are exact."""
    prompts = [tokens_of(text) for text in texts]
    found = engine.complete(prompts, keys or [0] * len(texts), temperature=temperature, max_new_tokens=max_new_tokens)
    assert {engine._version} == {one.version for one in found}
    return [(CharacterTokenizer().decode(one.tokens.tolist()), one.is_exact) for one in found]


def test_answers_come_in_order_as_tokens(engine):
    """The end token belongs to an answer that ended by itself; keys and temperature arrive."""
    assert [("dc ba$", True), ("a very lo", True)] == complete(engine, "ab cd", "gnol yrev a")
    assert [(f"{2**31 - 1}"[:9], True), ("5$", True)] == complete(engine, "seed", "seed", keys=[2**64 - 1, 5 << 33])
    assert [("0.25$", True)] == complete(engine, "heat", temperature=0.25)
    many = [f"{number:03}" for number in range(40)]
    assert [(f"{text[::-1]}$", True) for text in many] == complete(engine, *many)


def test_what_text_loses_is_said(engine):
    """More tokens were drawn than the text has; an answer without text is the end token."""
    assert [(" tsol$", False), ("$", True)] == complete(engine, "lost ", "silent")
    assert [("$", False)] == complete(engine, "silent", max_new_tokens=1)


def test_log_probabilities_come_where_they_are_given(engine):
    """One for each token, or none."""
    prompts = [tokens_of("logs"), tokens_of("none")]

    with_them, without = engine.complete(prompts, [0, 0], temperature=1.0, max_new_tokens=9)

    assert [-0.5 * place for place in range(5)] == with_them.log_probabilities.tolist()
    assert without.log_probabilities is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("refuse", 'answers with status 400: {"detail": "no such model"}'),
        ("split", "reads 7 tokens in a prompt of 6: it has another tokenizer"),
        ("stranger", "answers with the model other, not with .*weights-3"),
        ("junk", r'gives no completion, but {"choices": \[\]}'),
        ("$", r"reads text, and no text has the tokens of the prompt '\^\$'"),
    ],
)
def test_other_answers_are_refused(engine, text, says):
    """By the key of the engine, and with what was found."""
    prompt = [BEGIN, END] if text == "$" else tokens_of(text)
    with pytest.raises(ConfigError, match=f"grpo.engine_command: {says}"):
        engine.complete([prompt], [0], temperature=1.0, max_new_tokens=4)


def test_each_version_has_a_server_of_its_own(engine, tmp_path):
    """The one before ends; one that dies is named with its status and last words."""
    before = engine._process.pid
    (tmp_path / "weights-4").mkdir()

    engine.update(4, str(tmp_path / "weights-4"))

    assert not lives(before)
    assert [("4$", True)] == complete(engine, "folder")
    with pytest.raises(ConfigError, match=r"grpo.engine_command: ended with status 7: out of memory"):
        complete(engine, "die")
    engine.close()
    with pytest.raises(ConfigError, match=r"does not answer on http://127.0.0.1:.*refused"):
        complete(engine, "ab")


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("no-such-command {folder} {port}", "cannot be started: .*no-such-command"),
        ("sh -c 'echo no room; exit 3' {folder} {port}", "ended with status 3: no room"),
        ("false {folder} {port}", "ended with status 1: it printed nothing"),
    ],
)
def test_a_server_that_does_not_start_is_refused(tmp_path, command, says):
    """At once, with its reason."""
    engine = ServerEngine(command, tokenizer=CharacterTokenizer(), group=OneRank())

    with pytest.raises(ConfigError, match=f"grpo.engine_command: {says}"):
        engine.update(0, str(tmp_path))
