"""
A shell script -> its commands, without running anything.

Rules kept here: `shlex` reads quotes and operators. Variables are those that the script assigns
before, then those of the environment. `$NAME`, `${NAME}` and `${NAME:-x}` are replaced, and split
at blanks where they stand outside of quotes. `$((…))` and `$(expr …)` over whole numbers are
computed. A word that holds any other expansion is marked as computed, and refused where it is used.
Statements that decide which commands run (`if`, `for`, functions) are refused by their line.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from packplan.core.conversion.arithmetic import compute
from packplan.core.errors import ConfigError, Fault

_CONTROL = frozenset(
    "if then else elif fi for while until do done case esac function select [[ { } ! coproc unset".split()  # noqa: SIM905
)
"""First words of statements that are not read."""

_OPERATORS = "\n;&|<>()"

_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=")

_NESTED = r"(?:[^()]|\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\))*"
"""Text whose parentheses close, up to three inside each other."""

_VARIABLE = re.compile(r"""\$\{(?P<braced>\w+)(?::-(?P<default>[^{}$`"'\\]*))?\}|\$(?P<name>[A-Za-z_]\w*)""")

_EXPANSION = re.compile(
    rf"\$\(\((?P<sum>{_NESTED})\)\)|(?:\$\(|`)\s*expr\s(?P<expr>{_NESTED})[)`]"
    rf"|\$\({_NESTED}\)|`[^`]*`|\$\{{[^}}]*\}}|\$[\d@*#?!$-]"
)

_EXPR_WORD = re.compile(r"-?\d+|[-+/%]|\\[*()]|(['\"])[-+*/%()]\1")

_SKIPPED = re.compile(r"#[^\n]*|\d+(?=[<>])")
"""Comments, and numbers before a redirection."""

_HIDDEN = {ord(char): chr(0xD800 + ord(char)) for char in f"{_OPERATORS} \t'\"\\$`"}
"""Characters of meaning to a shell -> surrogates for them as plain text; no script holds these."""

_SHOWN = {ord(hidden): chr(char) for char, hidden in _HIDDEN.items()}

_BLANKS = {ord(hidden): " " for char, hidden in _HIDDEN.items() if chr(char) in " \t\n"}

_COMPUTED = 0xD900
"""First of the characters that stand for expansions of unknown value; surrogates too."""

_COMPUTED_MARK = re.compile("[\ud900-\udbff]")


@attrs.frozen
class Word:
    """A word of a command, as the shell would hand it over."""

    text: str

    computed: tuple[str, ...] = ()
    """Expansions in it whose value only the shell knows, as they are written, with their lines."""


@attrs.frozen
class Command:
    """A command of a script."""

    line: int
    """Line of its first word, from 1."""

    environment: Mapping[str, Word]
    """Variables that it is given beyond those of the process."""

    words: tuple[Word, ...]


def read_script(text: str, environment: Mapping[str, str], *, source: str) -> tuple[Command, ...]:
    r"""
    Return the commands of a shell script, its assignments carried out.

    Args:
        text: The script, or a single command line.
        environment: Variables of the process, which those of the script replace.
        source: Name of the script, for errors.

    Raises:
        ConfigError: A quote does not close, or a statement is none of those that are read.

    >>> [command] = read_script("n=2\nGPUS=$n swift sft --seed '7'", {}, source="a.sh")
    >>> [word.text for word in command.words], command.environment["GPUS"].text
    (['swift', 'sft', '--seed', '7'], '2')
    """
    script = _Script(text.replace("\r\n", "\n"), environment)
    try:
        return tuple(_commands(script))
    except ValueError as error:
        reason = "a quote of it does not close" if "closing quotation" in str(error) else str(error)
        raise ConfigError(source, (Fault(f"line {script.line}", f"{reason}: write the command out"),)) from None


def _commands(script: _Script) -> Iterator[Command]:
    exported: dict[str, None] = {}
    for line, words in _statements(script):
        values: dict[str, str] = {}
        while words and (found := _ASSIGNED.match(words[0])):
            values |= script.assigned(words.pop(0), found)
        if not words:
            script.variables |= values
        elif words[0] == "export":
            for word in words[1:]:
                found = _ASSIGNED.match(word)
                script.variables |= script.assigned(word, found) if found else {}
                exported[found[1] if found else word] = None
        else:
            script.line = line
            if words[0] in _CONTROL:
                message = f"{words[0]} decides which commands run or what they see, and nothing is run here"
                raise ValueError(message)
            if words[0].startswith("-"):
                message = f"{words[0]} stands alone, for a blank or a comment behind the \\ before it ended the command"
                raise ValueError(message)
            values = {name: script.variables[name] for name in exported if name in script.variables} | values
            environment = {name: script.word(value) for name, value in values.items()}
            yield Command(line, environment, tuple(map(script.word, words)))


def _statements(script: _Script) -> Iterator[tuple[int, list[str]]]:
    """Yield the line and the words of each statement, without its redirections and pipes."""
    words: list[str] = []
    line, redirected, piped = 1, False, False
    while (token := script.lexer.get_token()) is not None:
        if token[:1] not in tuple(_OPERATORS):
            line = line if words else script.line
            words += [] if redirected or piped else [token]
            redirected = False
        elif "(" in token or ")" in token or "<<" in token:
            message = f"{token.strip()} is a function, a list, a subshell or a text behind a command, and is not read"
            raise ValueError(message)
        elif "<" in token or ">" in token:
            redirected = True
        elif token.startswith("|"):
            piped = True
        else:
            yield line, words
            words, piped = [], False
    yield line, words


class _Script:
    """Characters of a script for `shlex`: variables replaced, plain text hidden from it."""

    def __init__(self, text: str, environment: Mapping[str, str]) -> None:
        self._text, self._at, self._pending = text, 0, ""
        self._computed: list[str] = []
        self.line = 1
        self.variables = {name: value.translate(_HIDDEN) for name, value in environment.items()}
        self.lexer: Any = shlex.shlex("", posix=True, punctuation_chars=_OPERATORS)
        self.lexer.instream = self  # type: ignore[assignment]  # it only calls read
        self.lexer.whitespace, self.lexer.whitespace_split, self.lexer.commenters = " \t", True, ""

    def assigned(self, word: str, found: re.Match[str]) -> dict[str, str]:
        """Return the variable that a word assigns, and its value."""
        name, appended = found.groups()
        return {name: (self.variables.get(name, "") if appended else "") + word[found.end() :]}

    def word(self, token: str) -> Word:
        """Return a token as a word: its text, and the expansions that a shell would compute."""
        computed = tuple(self._computed[ord(mark) - _COMPUTED] for mark in _COMPUTED_MARK.findall(token))
        return Word(_COMPUTED_MARK.sub("", token).translate(_SHOWN), computed)

    def read(self, _: int) -> str:
        """Return the next character; empty at the end."""
        while not self._pending and self._at < len(self._text):
            self._pending = self._next()
        char, self._pending = self._pending[:1], self._pending[1:]
        return char

    def _next(self) -> str:
        """Return the characters that the next one stands for; none for a comment."""
        state, char, start = self.lexer.state, self._text[self._at], self._at
        is_quoted = state in tuple("'\"")
        if state == "c" and char not in _OPERATORS:
            return " "  # the operator ends here, so that its statement is carried out before more is read
        if state == " ":
            self.line = self._text.count("\n", 0, start) + 1
            if skipped := _SKIPPED.match(self._text, start):
                self._at = skipped.end()
                return ""
        self._at += 1
        if char == "\\" and state != "'":
            return self._escaped(is_quoted=is_quoted)
        if char in "$`" and state != "'":
            value = self._expanded(start)
            return value if is_quoted else value.translate(_BLANKS)
        return char.translate(_HIDDEN) if is_quoted and char != state else char

    def _escaped(self, *, is_quoted: bool) -> str:
        """Return the character behind a backslash, or the backslash where it is plain text."""
        following = self._text[self._at : self._at + 1]
        if is_quoted and following not in tuple('"\\$`\n'):
            return "\\".translate(_HIDDEN)
        self._at += 1
        return following.replace("\n", "").translate(_HIDDEN)

    def _expanded(self, start: int) -> str:
        """Return the value of the expansion that begins at a character, or a mark of it."""
        if found := _VARIABLE.match(self._text, start):
            self._at = found.end()
            value = self._value(found)
            return self._mark(start) if value is None else value
        found = _EXPANSION.match(self._text, start)
        if found is None:
            if self._text.startswith(("`", "$(", "${"), start):
                message = f"{self._text[start : start + 20]!r} does not close"
                raise ValueError(message)
            return "$".translate(_HIDDEN)
        self._at = found.end()
        if found["sum"] is None and found["expr"] is None:
            return self._mark(start)
        try:
            return str(self._result(found))
        except ValueError:
            return self._mark(start, ": only whole numbers, + - * / % and parentheses are computed")

    def _mark(self, start: int, why: str = "") -> str:
        line = self._text.count("\n", 0, start) + 1
        self._computed.append(f"{self._text[start : self._at]} in line {line}{why}")
        return chr(_COMPUTED + len(self._computed) - 1)

    def _value(self, found: re.Match[str]) -> str | None:
        value = self.variables.get(found["braced"] or found["name"])
        return value or (value if found["default"] is None else found["default"].translate(_HIDDEN))

    def _result(self, found: re.Match[str]) -> int:
        """Return the value of `$((…))`, where a name alone is a variable too, or of `expr`."""
        text = _VARIABLE.sub(lambda name: self._value(name) or "", found["sum"] or found["expr"] or "")
        if found["expr"] is None:
            return compute(re.sub(r"[A-Za-z_]\w*", lambda name: self.variables.get(name[0], ""), text))
        words = text.split()
        if not all(_EXPR_WORD.fullmatch(word) for word in words):
            raise ValueError(text)
        return compute(" ".join(word.strip("\\'\"") for word in words))
