"""
Numbers of tokens of texts, by the words that a tokenizer splits them into.

Most tokenizers split a text at their special tokens, then into words by a regular expression, and
make tokens of each word by itself. Words return again and again, and so the tokens of each are
counted once. A tokenizer is counted for where its library splits a long random text into the same
words as the expression here does, and each further character where it does so among others.
"""

from __future__ import annotations

import json
import random
import re
import unicodedata
from collections.abc import Iterator
from itertools import product
from typing import Any

import attrs
import regex
from tokenizers import Tokenizer, models, pre_tokenizers

_MOST_WORDS, _LONGEST_WORD = 2**17, 64
"""Words whose number of tokens is kept, about 20 MB of them; and characters of each at most."""

_PROOF_SIZE = 6_000
"""Characters and special tokens of the random text."""

_COMMON = "aeLst  '.,/<_\n\r\t019"
"""Characters that splits depend on; a half of the random text."""

_NEIGHBOURS = ("a", "T", "1", ".", " ", "\n", "'")
"""Characters that a new one is tried between."""

_LEFT = {"Cn", "Co", "Cs", "Lo"}
"""
Categories of characters that the library is left with: those that another version of Unicode may
know otherwise, and letters as of Chinese, whose words are long, and seldom come again.
"""

_OF_BYTES = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""The expression of `ByteLevel` where it has none beside it."""

_ASCII = {r"\p{L}": "A-Za-z", r"\p{Lu}": "A-Z", r"\p{Ll}": "a-z", r"\p{N}": "0-9"}
"""Properties -> their ASCII characters."""

_NO_ASCII = {rf"\p{{{name}}}" for name in ("Lt", "Lm", "Lo", "M")}
"""Properties of no ASCII character."""

_TO_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


@attrs.frozen
class Counted:
    """A text whose tokens are counted."""

    size: int
    parts: list[str]
    """Texts, and special tokens at every second place."""

    counter: WordCounter

    def __len__(self) -> int:
        return self.size

    def first(self, number: int) -> list[int]:
        """Return the ids of the first tokens."""
        ids: list[int] = []
        for more in self.counter.ids(self.parts):
            ids += more
            if len(ids) >= number:
                break
        return ids[:number]


class WordCounter:
    """Counts the tokens of texts by their words."""

    def __init__(self, library: Tokenizer, pattern: str, *, to_bytes: bool) -> None:
        """
        Count for a tokenizer; `prove_words` says whether that is exact.

        Args:
            library: Splits by *pattern* alone, behind its special tokens.
            pattern: Regular expression of a word.
            to_bytes: Whether its model gets bytes, as characters that stand for them.
        """
        self._library, self._model, self._to_bytes = library, library.model, to_bytes
        self._find = regex.compile(pattern).findall
        try:
            self._find_ascii = re.compile(_in_ascii(pattern), re.ASCII).findall
        except re.error:
            self._find_ascii = self._find
        special = {token.content: place for place, token in library.get_added_tokens_decoder().items()}
        self._special = special
        longest_first = sorted(special, key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})").split
        self._composes = library.normalizer is not None
        self._counts: dict[str, int] = {}
        self._settled: set[str] = set()
        self._unsettled: set[str] = set()

    def count(self, text: str) -> Counted | None:
        """Return a text with the number of its tokens; None where the library has to be asked."""
        if text.isascii():
            find = self._find_ascii
        elif self._settles(text):
            find = self._find
        else:
            return None
        size, parts, known = 0, self._split(text), self._counts
        for place, part in enumerate(parts):
            if place % 2:
                size += 1
            elif part:
                words = find(part)
                if sum(map(len, words)) != len(part):
                    return None
                try:
                    size += sum(map(known.__getitem__, words))
                except KeyError:
                    size += self._learn(words)
        return Counted(size, parts, self)

    def _learn(self, words: list[str]) -> int:
        """Return the number of tokens of words, and keep that of each."""
        known = self._counts
        new = {word: len(self._tokens(word)) for word in set(words).difference(known)}
        size = sum(new[word] if word in new else known[word] for word in words)
        if len(known) + len(new) > _MOST_WORDS:
            known.clear()
        known.update((word, number) for word, number in new.items() if len(word) <= _LONGEST_WORD)
        return size

    def _tokens(self, word: str) -> Any:
        held = _TO_BYTES.pre_tokenize_str(word)[0][0] if self._to_bytes else word
        return self._model.tokenize(held)

    def ids(self, parts: list[str]) -> Iterator[list[int]]:
        """Yield the ids of each special token and of each word of a text."""
        for place, part in enumerate(parts):
            if place % 2:
                yield [self._special[part]]
            else:
                yield from ([token.id for token in self._tokens(word)] for word in self._find(part))

    def _settles(self, text: str) -> bool:
        """Return whether a text has only characters that the expression splits as the library."""
        found = set(text)
        if not found <= self._settled:
            for one in found - self._settled - self._unsettled:
                (self._settled if one.isascii() or self._is_settled(one) else self._unsettled).add(one)
            if not found <= self._settled:
                return False
        return not self._composes or unicodedata.is_normalized("NFC", text)

    def _is_settled(self, one: str) -> bool:
        if unicodedata.category(one) in _LEFT:
            return False
        around = product((*_NEIGHBOURS, one), repeat=2)
        return self.splits_alike("".join(f"{before}{one}{after}" for before, after in around), self._find)

    def splits_alike(self, text: str, find: Any) -> bool:
        """Return whether the library splits a text into the words that *find* gives."""
        split: list[tuple[str, tuple[int, int]]] = self._library.pre_tokenizer.pre_tokenize_str(text)
        found: list[str] = find(text)
        return [text[start:end] for _, (start, end) in split] == found

    def is_proven(self) -> bool:
        """Return whether words and tokens of a random text, of ASCII, are the library's."""
        rng = random.Random(0)  # noqa: S311  # the same text each time
        alphabet = [*_COMMON * 8, *map(chr, range(128)), *self._special]
        text = "".join(rng.choices(alphabet, k=_PROOF_SIZE))
        found = self.count(text)
        ids = self._library.encode(text, add_special_tokens=False).ids
        return (
            found is not None
            and len(found) == len(ids)
            and found.first(len(ids)) == ids
            and self.splits_alike(text, self._find_ascii)
            and self.splits_alike(text, self._find)
        )


def prove_words(library: Tokenizer) -> WordCounter | None:
    """Return the counter of tokens by words that equals a tokenizer; None where there is none."""
    tokens = library.get_added_tokens_decoder().values()
    if not isinstance(library.model, models.BPE) or library.model.dropout or library.encode_special_tokens:
        return None
    if library.truncation or library.padding or any(one.lstrip or one.rstrip or one.single_word for one in tokens):
        return None
    if len({one.normalized for one in tokens}) > 1 or _state(library.normalizer) not in (None, {"type": "NFC"}):
        return None
    split = _state(library.pre_tokenizer) or {"type": None}
    steps = split["pretokenizers"] if split["type"] == "Sequence" else [split]
    pattern = _pattern(steps)
    if pattern is None:
        return None
    try:
        counter = WordCounter(library, pattern, to_bytes=steps[-1]["type"] == "ByteLevel")
    except regex.error:
        return None
    return counter if counter.is_proven() else None


def _state(part: Any) -> Any:
    """Return a part of a tokenizer, as JSON has it."""
    return None if part is None else json.loads(part.__getstate__())


def _pattern(steps: list[dict[str, Any]]) -> str | None:
    """Return the regular expression of the words of a pre-tokenizer; None of another kind."""
    *before, last = steps
    if last["type"] == "ByteLevel":
        if last["add_prefix_space"] or (last["use_regex"] and before):
            return None
        if last["use_regex"]:
            return _OF_BYTES
    else:
        before = steps
    if len(before) != 1 or before[0]["type"] != "Split":
        return None
    (split,) = before
    found = split["pattern"].get("Regex")
    return found if split["behavior"] == "Isolated" and not split["invert"] else None


def _in_ascii(pattern: str) -> str:
    """Return a regular expression for ASCII alone, which Python's faster library takes."""
    found, inside = "", False
    for part in re.findall(r"\\p\{\w+\}|\\.|[^\\]", pattern, re.DOTALL):
        held = "é" if part in _NO_ASCII else _ASCII.get(part)  # a character that is not there
        found += part if held is None else held if inside else f"[{held}]"
        inside = part == "[" or (inside and part != "]")
    return found
