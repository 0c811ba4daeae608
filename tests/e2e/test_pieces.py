"""Lengths that are counted from the template's texts are those of full encodes."""

import random

import pytest
from PIL import Image
from swift.template import Template

from packplan.adapters.samples.shortcut import PieceCounter, find_piece_counter
from packplan.core.samples.tables import MeasuredSample, ShortcutError
from tests.e2e.ready import measured
from tests.records import asked, chat

MARKS = (
    "<|im_end|>", "<|im_start|>user\n", "<think>\nso\n</think>\n\n", "<bbox>", "<ref-object>", "<video>", "  ", "\n",
    "<|endoftext|>", "é", "\u0301", "你好", "🙂", "",
)  # fmt: skip
"""Texts that a template or a tokenizer may treat otherwise than words."""


def text(rng: random.Random) -> str:
    words = [rng.choice(("sea", "A hill!", "12,345", "the", "ok\n\n", *MARKS)) for _ in range(rng.randint(1, 30))]
    return rng.choice(("", " ")).join(words)


def record(rng: random.Random, num_images: int = 0) -> dict:
    """Return a record of any number of turns, some with marks, some not trained."""
    messages = []
    if rng.random() < 0.4:
        messages.append({"role": "system", "content": rng.choice(("", "Be brief.", text(rng)))})
    for _ in range(rng.randint(1, 4)):
        # One role may speak again and again.
        messages += [{"role": "user", "content": text(rng)} for _ in range(rng.choice((1, 1, 1, 2)))]
        messages += [
            {"role": "assistant", "content": text(rng), **rng.choice(({}, {}, {"loss": False}, {"loss": True}))}
            for _ in range(rng.choice((1, 1, 2)))
        ]
    messages[-1] = {"role": "assistant", "content": text(rng) + "."}
    if rng.random() < 0.1:
        messages = messages[-1:]
    questions = [message for message in messages if message["role"] == "user"] or messages
    for number in range(num_images):
        rng.choice(questions)["content"] += f"<image>{number}"
    return chat(*messages, **({"images": [f"{n}.png" for n in range(num_images)]} if num_images else {}))


@pytest.mark.slow
@pytest.mark.parametrize("of", ["qwen2", "qwen3", "qwen2_5_vl", "qwen3_vl"])
def test_texts_measure_as_full_encodes_do(of, open_source, tmp_path):
    """Whatever the turns, the marks in them and where images stand, also truncated."""
    rng = random.Random(of)  # noqa: S311
    most = 3 if of.endswith("vl") else 0
    for number in range(most):
        Image.new("RGB", (40 + 90 * number, 100)).save(tmp_path / f"{number}.png")
    records = [record(rng, rng.randint(0, most)) for _ in range(50)]
    scale = {"qwen2": "all"}.get(of, "default")  # of a template that trains the first token too
    source, _ = open_source(records, of, max_length=700, truncation_strategy="right", loss_scale=scale)

    lengths = [one.measurement for one in measured(source) if isinstance(one, MeasuredSample)]

    assert source._piece_counter, "all were encoded in full"
    assert len(lengths) > 40
    assert 5 < sum(one.cut for one in lengths) < 25


def test_a_sample_is_truncated_from_its_first_token_above_the_limit(open_source):
    """And a sample of as many tokens as the limit is whole."""

    def measurement(**template):
        (outcome,) = measured(open_source([asked("a")], "qwen2", **template)[0])
        return outcome.measurement

    whole = measurement().length
    for limit in (whole - 1, whole, whole + 1):
        found = measurement(max_length=limit, truncation_strategy="left")
        assert (min(limit, whole), limit < whole) == (found.length, found.cut)


def test_few_samples_are_encoded(open_source):
    """Those that prove the way, the first of each kind, one in hundreds; and each is read once."""
    source, encoder = open_source([record(random.Random(6))] * 600, "qwen2")  # noqa: S311
    calls, encode = [], encoder.template.encode
    encoder.template.encode = lambda *args, **options: calls.append(args) or encode(*args, **options)
    seen, read = [], encoder.read_sample
    encoder.read_sample = lambda index: seen.append(index) or read(index)

    assert 1 == len(set(source.measure_many(range(600), in_full=False)))

    # Two that prove the template, the first of its kind, and number 512.
    assert 4 == len(calls)
    assert list(range(600)) == seen
    heads = [bytes.fromhex(source.digest_and_folder(index)[0])[:8] for index in range(600)]
    assert heads == [head.tobytes() for head in source.record_heads()]


@pytest.mark.parametrize("number", [0, 70])
def test_a_count_that_is_wrong_is_found_by_the_audit(number, open_source, monkeypatch):
    """The first record of a kind is encoded too, wherever it stands."""
    records = [asked("a")] * 100
    records[number] = chat(*asked("a")["messages"] * 3)
    source, _ = open_source(records, "qwen2")
    ends = PieceCounter._count_trained_turn_ends
    # Right for what proves the way: one turn, and two.
    monkeypatch.setattr(PieceCounter, "_count_trained_turn_ends", lambda self, got: len(got) < 6 and ends(self, got))

    with pytest.raises(ShortcutError, match=rf"a shortcut measured .* instead of .* for .*line {number + 1}$"):
        list(source.measure_many(range(100), in_full=False))


def test_a_template_with_ways_of_its_own_encodes_each_sample(open_source):
    """And says which way it is."""
    source, encoder = open_source([record(random.Random(n)) for n in range(3)], "qwen2")  # noqa: S311

    class Own(Template):
        def _tokenize(self, context, **kwargs):
            return super()._tokenize(context, **kwargs) * 2

    encoder.template.__class__ = Own
    encoder._reference = encoder.template  # as ms-swift's own would be

    assert (None, "the template overrides tokenize") == find_piece_counter(encoder.template, tokens={})
    assert 3 == len(measured(source))
