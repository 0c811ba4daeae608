"""Tokens that are counted by words are those of the tokenizer's library, for every text."""

from __future__ import annotations

import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from packplan.adapters.samples.counting import words
from packplan.adapters.samples.counting.words import WordCounter, prove_words

QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA = QWEN.replace(r"\p{N}|", r"\p{N}{1,3}|", 1)
CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GAPS = r"\p{L}+|\p{N}"

TEXT = "the sea's 12 hills\nof the sea, THE SEA\n\n  they've seen; “été” naïve\n" * 3

SPECIAL = ["<|end|>", "<|end|>x", "<tool>"]

pieces = st.sampled_from(
    [
        "the", " sea", "They'", "'s", "'S", "'\u017f", "'ve", "12", "3", " ", "  ", "\n", "\r\n", "\t", "\x1c", "\x85",
        "\xa0", "\u2028", "/", "<", "<|", "end|>", *SPECIAL, "é", "e\u0301", "\u0301", "İ", "ǅ", "ʰ", "你好", "“", "—",
        "🙂", "\u0378", "\ue000", "½", "٣",
    ]
)  # fmt: skip
texts = st.lists(pieces | st.text(max_size=2), max_size=20).map("".join)


def split(pattern: str, behavior: str = "isolated") -> pre_tokenizers.PreTokenizer:
    """Return the pre-tokenizer of models that split by a pattern, then into bytes."""
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), behavior), to_bytes])


def library(pre_tokenizer: pre_tokenizers.PreTokenizer, *, composes: bool = True, special: bool = True) -> Tokenizer:
    """Return a tokenizer that learned some merges of bytes, and has special tokens."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizer
    if composes:
        made.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        [TEXT], trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    )
    if special:
        made.add_special_tokens(SPECIAL)
    return made


COUNTED = {
    "Qwen": library(split(QWEN)),
    "Llama": library(split(LLAMA), composes=False),
    "by case": library(split(CASED)),
    "GPT-2": library(pre_tokenizers.ByteLevel(add_prefix_space=False), composes=False),
    "no special tokens": library(split(QWEN), special=False),
}

COUNTERS = {name: prove_words(one) for name, one in COUNTED.items()}


@pytest.mark.parametrize("name", COUNTED)
@given(text=texts)
def test_counts_are_the_numbers_of_tokens_of_the_library(name, text):
    """For any characters, blanks, contractions and special tokens, and with the first tokens."""
    counter, ids = COUNTERS[name], COUNTED[name].encode(text, add_special_tokens=False).ids
    assert counter is not None

    found = counter.count(text)

    event(f"counted: {found is not None}")
    if found is not None:
        assert len(ids) == len(found)
        assert ids[:3] == found.first(3)


def test_texts_of_known_characters_are_counted():
    """Those of ASCII, accents, quotes and emojis; not those whose normal form is another one."""
    counter = COUNTERS["Qwen"]
    counted = {
        text: counter.count(text) is not None for text in ("the sea<tool>", "été “—” 🙂", "e\u0301", "你好", "\u0378")
    }

    assert [True, True, False, False, False] == [*counted.values()]


def sizes(counter: WordCounter, text: str) -> int | None:
    """Return the number of tokens of a text; None where it is not counted."""
    found = counter.count(text)
    return None if found is None else len(found)


@given(st.lists(texts, max_size=6))
def test_counts_do_not_depend_on_the_words_that_are_kept(several):
    """Where all words are forgotten again and again, too."""
    forgetful = WordCounter(COUNTED["Qwen"], QWEN, to_bytes=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(words, "_MOST_WORDS", 3)
        patch.setattr(words, "_LONGEST_WORD", 4)
        few = [sizes(forgetful, text) for text in several * 2]

    assert [sizes(COUNTERS["Qwen"], text) for text in several * 2] == few


def other(**settings) -> Tokenizer:
    """Return a tokenizer with a special token that is found in another way."""
    made = library(split(QWEN))
    made.add_tokens([AddedToken("<odd>", **{"normalized": False, **settings})])
    return made


def truncating() -> Tokenizer:
    """Return a tokenizer that truncates."""
    made = library(split(QWEN))
    made.enable_truncation(8)
    return made


OTHERS = {
    "no word": library(pre_tokenizers.Metaspace()),
    "several patterns": library(pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.ByteLevel()])),
    "a blank before": library(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "patterns that leave gaps": library(split(GAPS)),
    "words that are joined": library(split(QWEN, "merged_with_next")),
    "tokens that take blanks": other(lstrip=True),
    "tokens of normal form": other(normalized=True),
    "truncating": truncating(),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_tokenizers_are_asked_for_all_texts(name):
    """Those whose words, or whose special tokens, are found in another way."""
    assert prove_words(OTHERS[name]) is None


@pytest.mark.parametrize("name", [name for name in OTHERS if name != "patterns that leave gaps"])
def test_most_other_tokenizers_are_known_without_a_proof(name, monkeypatch):
    """By their settings, however seldom a text shows the difference."""
    monkeypatch.setattr(WordCounter, "is_proven", lambda _: True)

    assert prove_words(OTHERS[name]) is None


def test_texts_with_gaps_between_words_are_left_to_the_library():
    """Of them, no word says how many tokens they are."""
    counter = WordCounter(OTHERS["patterns that leave gaps"], GAPS, to_bytes=True)

    assert [1, None] == [sizes(counter, text) for text in ("a", "a!")]


def test_a_tokenizer_that_splits_otherwise_is_found(monkeypatch):
    """By the random text, whatever its pattern says."""
    monkeypatch.setattr(words, "_pattern", lambda _: LLAMA)

    assert prove_words(COUNTED["Qwen"]) is None


def test_a_character_that_is_split_otherwise_is_left_to_the_library():
    """As one that another version of Unicode takes for a letter."""
    counter = WordCounter(COUNTED["Qwen"], QWEN.replace(r"\p{L}", r"\p{L}½"), to_bytes=True)

    assert counter.count("a½") is None
