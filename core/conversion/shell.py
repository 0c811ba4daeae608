"""
A shell script -> its commands, without running anything.

Rules kept here: variables are those that the script assigns before, then those of the environment;
an unquoted variable is split at blanks, as a shell does; `$((…))` and `expr` over whole numbers are
computed here; what else the script would compute (`$(…)`, backquotes, `$1`, `${x%y}`, a variable
that nothing sets) makes the word that holds it computed, which only matters where the word is used.
What decides which commands run at all (`if`, `for`, functions) is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import attrs

from packplan.core.conversion.arithmetic import compute
from packplan.core.errors import ConfigError, Fault

_CONTROL = frozenset(
    "if then else elif fi for while until do done case esac function select [[ { } ! coproc".split()  # noqa: SIM905
)
"""Words at the start of a command that decide which commands run."""

_NAME = re.compile(r"[A-Za-z_]\w*")

_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=")

_WITH_DEFAULT = re.compile(r"([A-Za-z_]\w*)(:?[-=])(.*)", re.DOTALL)

_WHICH = re.compile(r"(?:\$\(|`)\s*(?:which|command\s+-v)\s+([\w./+-]+)\s*[)`]")
"""What only looks up where a program is: its name says as much."""

_ARITHMETIC = re.compile(r"\$\(\((?P<sum>.*)\)\)|\$\(\s*(?P<expr>expr\s.*)\)|`\s*(?P<quoted>expr\s.*)`", re.DOTALL)
"""Arithmetic of the shell itself, and of the program `expr`."""

_TOKEN = re.compile(r"[A-Za-z_]\w*|\d+|\+\+|--|\S")

_BLANKS = " \t"


@attrs.frozen
class Word:
    """A word of a command, as the shell would hand it over."""

    text: str

    computed: tuple[str, ...] = ()
    """What in it only the shell could say, as it is written, with its line; empty if nothing."""

    quoted: bool = False
    """Whether a part of it is quoted: such a word may be empty."""


@attrs.frozen
class Command:
    """A command of a script."""

    line: int
    """Where it begins, from 1."""

    environment: Mapping[str, Word]
    """Variables that it sees beyond those of the process: exported ones, and those before it."""

    words: tuple[Word, ...]


def read_script(text: str, environment: Mapping[str, str], *, source: str) -> tuple[Command, ...]:
    r"""
    Return the commands of a shell script, its assignments carried out.

    Args:
        text: The script, or a single command line.

        environment: Variables of the process, which the script's own come before.

        source: Name of the script, for errors.

    Raises:
        ConfigError: Quotes do not close, or the script decides what runs.

    >>> [command] = read_script("n=2\nGPUS=$n swift sft --seed '7'", {}, source="a.sh")
    >>> [word.text for word in command.words], command.environment["GPUS"].text
    (['swift', 'sft', '--seed', '7'], '2')
    """
    variables = {name: Word(value) for name, value in environment.items()}
    return tuple(_Reader(text.replace("\r\n", "\n"), variables, source).commands())


class _Reader:
    """Reads a script from its start."""

    def __init__(self, text: str, variables: dict[str, Word], source: str) -> None:
        self._text, self._at, self._source, self._variables = text, 0, source, variables
        self._exported: dict[str, Word] = {}

    def commands(self) -> Iterator[Command]:
        """Yield the commands, in order."""
        while self._at < len(self._text):
            line = self._line()
            words = self._statement()
            before: dict[str, Word] = {}
            while words and (assigned := _ASSIGNED.match(words[0].text)) and not words[0].text.startswith("="):
                self._assign(words.pop(0), assigned, before)
            if not words:
                self._variables |= before
                self._exported |= {name: word for name, word in before.items() if name in self._exported}
                continue
            if words[0].text == "export":
                self._export(words[1:])
                continue
            if words[0].text == "unset":
                for word in words[1:]:
                    self._variables.pop(word.text, None)
                    self._exported.pop(word.text, None)
                continue
            if words[0].text in _CONTROL and not words[0].quoted:
                reason = f"{words[0].text} decides what runs, and nothing is run here: write the command out"
                raise self._error(line, reason)
            if words[0].text.startswith("-"):
                reason = f"{words[0].text} stands alone: a blank or a comment behind the \\ before it ended the command"
                raise self._error(line, reason)
            yield Command(line, self._exported | before, tuple(words))

    def _assign(self, word: Word, assigned: re.Match[str], before: dict[str, Word]) -> None:
        name, appended = assigned.groups()
        value = attrs.evolve(word, text=word.text[assigned.end() :])
        if appended:
            old = before.get(name) or self._variables.get(name) or Word("")
            value = Word(old.text + value.text, old.computed + value.computed, quoted=True)
        before[name] = value

    def _export(self, words: list[Word]) -> None:
        for word in words:
            assigned = _ASSIGNED.match(word.text)
            if assigned:
                value: dict[str, Word] = {}
                self._assign(word, assigned, value)
                self._variables |= value
                self._exported |= value
            elif word.text in self._variables:
                self._exported[word.text] = self._variables[word.text]

    def _line(self) -> int:
        return self._text.count("\n", 0, self._at) + 1

    def _error(self, line: int, reason: str) -> ConfigError:
        return ConfigError(self._source, (Fault(f"line {line}", reason),))

    def _statement(self) -> list[Word]:
        """
        Return the words up to the end of a command; those that redirect it, or follow a pipe, are
        left out.
        """
        words: list[Word] = []
        word = _Building()
        redirected = piped = False
        while self._at < len(self._text):
            char = self._text[self._at]
            if char in _BLANKS or char in "\n;&|<>()":
                found = word.end()
                redirected, kept = (False, []) if redirected and found else (redirected, found)
                words += [] if piped else kept
                if char in "\n;" or (char == "&" and not self._text.startswith("&>", self._at)):
                    self._skip_operator(char)
                    break
                piped, redirected = self._operator(char, piped=piped, redirected=redirected, words=words)
                continue
            if char == "#" and word.is_empty:
                end = self._text.find("\n", self._at)
                self._at = len(self._text) if end < 0 else end
                continue
            self._character(char, word, words if not piped and not redirected else [])
        found = word.end()
        return words + ([] if piped or redirected else found)

    def _skip_operator(self, char: str) -> None:
        self._at += 2 if self._text.startswith(char * 2, self._at) and char != "\n" else 1

    def _operator(self, char: str, *, piped: bool, redirected: bool, words: list[Word]) -> tuple[bool, bool]:
        """Read a blank, a pipe or a redirection; return whether what follows is of one."""
        if char in _BLANKS:
            self._at += 1
            return piped, redirected
        if char in "()":
            reason = "a ( outside of quotes is a function, a list or a subshell, and nothing is run here"
            raise self._error(self._line(), f"{reason}: write the command out, and put quotes around texts")
        if char == "|":
            if self._text.startswith("||", self._at):
                self._at += 2
                return True, redirected
            self._at += 1
            return True, redirected
        if self._text.startswith("<<", self._at):
            raise self._error(self._line(), "<< is not read: write the command out")
        # `2>&1`, `>> file`, `&> file`: the number before it is no word of the command.
        if words and not piped and self._text[self._at - 1] in "012" and words[-1].text in {"0", "1", "2"}:
            words.pop()
        while self._at < len(self._text) and self._text[self._at] in "<>&":
            self._at += 1
        return piped, True

    def _character(self, char: str, word: _Building, words: list[Word]) -> None:
        """Read a character, an escaped one, a quoted text or a variable into *word*."""
        if char == "\\":
            following = self._text[self._at + 1 : self._at + 2]
            if following not in {"\n", ""}:
                word.add(following, quoted=True)
            self._at += 2
        elif char == "'":
            end = self._closing("'", self._at + 1)
            word.add(self._text[self._at + 1 : end], quoted=True)
            self._at = end + 1
        elif char == '"':
            self._double_quoted(word)
        elif char in "$`":
            value = self._expanded()
            words += word.add_split(value)
        else:
            word.add(char)
            self._at += 1

    def _double_quoted(self, word: _Building) -> None:
        start, line = self._at, self._line()
        self._at += 1
        word.add("", quoted=True)
        while (char := self._text[self._at : self._at + 1]) != '"':
            if not char:
                raise self._error(line, f'the " of {self._text[start : start + 20]!r} does not close: close it')
            if char == "\\" and self._text[self._at + 1 : self._at + 2] in {'"', "\\", "$", "`", "\n"}:
                escaped = self._text[self._at + 1]
                word.add("" if escaped == "\n" else escaped, quoted=True)
                self._at += 2
            elif char in "$`":
                value = self._expanded()
                word.add(value.text, quoted=True, computed=value.computed)
            else:
                word.add(char, quoted=True)
                self._at += 1
        self._at += 1

    def _expanded(self) -> Word:
        """Read a variable, or what the shell would compute."""
        start = self._at
        if self._text[start] == "`":
            self._at = self._closing("`", start + 1) + 1
            return self._as_computed(start)
        following = self._text[start + 1 : start + 2]
        if following == "(":
            self._at = self._closing_parenthesis(start + 1) + 1
            return self._as_computed(start)
        if following == "{":
            self._at = self._closing("}", start + 2) + 1
            return self._parameter(self._text[start + 2 : self._at - 1], start)
        name = _NAME.match(self._text, start + 1)
        if name:
            self._at = name.end()
            return self._value(name[0], start)
        if following and following in "0123456789@*#?!$-":
            self._at = start + 2
            return self._as_computed(start)
        self._at = start + 1
        return Word("$")

    def _parameter(self, inner: str, start: int) -> Word:
        if _NAME.fullmatch(inner):
            return self._value(inner, start)
        default = _WITH_DEFAULT.fullmatch(inner)
        if default is None or set(default[3]) & set("$`\"'"):
            return self._as_computed(start)
        held = self._variables.get(default[1])
        is_unset = held is None or (default[2].startswith(":") and not held.text and not held.computed)
        return Word(default[3]) if is_unset or held is None else held

    def _value(self, name: str, start: int) -> Word:
        return self._variables.get(name) or self._as_computed(start)

    def _as_computed(self, start: int) -> Word:
        written = self._text[start : self._at]
        if program := _WHICH.fullmatch(written):
            return Word(program[1])
        line, why = self._text.count("\n", 0, start) + 1, ""
        if arithmetic := _ARITHMETIC.fullmatch(written):
            try:
                return Word(str(compute(self._tokens(arithmetic))))
            except (ConfigError, ValueError) as error:
                why = f": {error}" if isinstance(error, ValueError) else ""
        return Word("", (f"{written} in line {line}{why}",))

    def _tokens(self, arithmetic: re.Match[str]) -> list[str]:
        """Return numbers and operators, variables expanded; ValueError if there is more."""
        text = arithmetic["sum"]
        command = arithmetic["expr"] or arithmetic["quoted"] or f'"{text}"'
        reader = _Reader(command, self._variables, self._source)
        words = reader.only_words()
        odd = set("|&<>;") if text is None else set('"\\')
        if odd & set(text or command) or any(word.computed or (word.text == "*" and not word.quoted) for word in words):
            message = "it holds more than whole numbers, + - * / % and parentheses"
            raise ValueError(message)
        if text is None:
            return [word.text for word in words[1:]]
        values = {name: word.text for name, word in self._variables.items() if not word.computed}
        return [values.get(token, token) for token in _TOKEN.findall(words[0].text)]

    def only_words(self) -> list[Word]:
        """Return the words of a text that is one command; ValueError if it is more."""
        words = self._statement()
        if self._at < len(self._text):
            message = "it is more than one command"
            raise ValueError(message)
        return words

    def _closing(self, quote: str, start: int) -> int:
        end = self._text.find(quote, start)
        if end < 0:
            line = self._text.count("\n", 0, start) + 1
            raise self._error(line, f"the {quote} of {self._text[start - 1 : start + 19]!r} does not close: close it")
        return end

    def _closing_parenthesis(self, start: int) -> int:
        depth, at = 0, start
        while at < len(self._text):
            char = self._text[at]
            if char in "'\"":
                at = self._closing(char, at + 1)
            depth += {"(": 1, ")": -1}.get(char, 0)
            if not depth:
                return at
            at += 1
        line = self._text.count("\n", 0, start) + 1
        raise self._error(line, f"the ( of {self._text[start - 1 : start + 19]!r} does not close: close it")


@attrs.define
class _Building:
    """A word while it is read."""

    text: str = ""
    computed: tuple[str, ...] = ()
    quoted: bool = False

    @property
    def is_empty(self) -> bool:
        return not (self.text or self.computed or self.quoted)

    def add(self, text: str, *, quoted: bool = False, computed: tuple[str, ...] = ()) -> None:
        """Append a text."""
        self.text += text
        self.quoted = self.quoted or quoted
        self.computed += computed

    def add_split(self, value: Word) -> list[Word]:
        """Append what an unquoted variable holds; return the words that its blanks end."""
        parts = re.split(r"[ \t\n]+", value.text)
        ended = []
        for part in parts[:-1]:
            self.text += part
            ended += self.end()
        self.text += parts[-1]
        self.computed += value.computed
        return ended

    def end(self) -> list[Word]:
        """Return the word, if there is one, and begin another."""
        found = [] if self.is_empty else [Word(self.text, self.computed, self.quoted)]
        self.text, self.computed, self.quoted = "", (), False
        return found
