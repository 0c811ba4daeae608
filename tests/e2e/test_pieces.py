"""Lengths that are counted from the template's texts are those of full encodes."""

import random

import pytest
from PIL import Image
from swift.template import Template

from packplan.adapters.samples.shortcut import PieceCounter, prove_pieces
from packplan.core.samples.tables import MeasuredSample, ShortcutError
from tests.e2e.test_videos import measurer_of
from tests.records import write_lines

MARKS = (
    "<|im_end|>", "<|im_start|>user\n", "<think>\nso\n</think>\n\n", "<bbox>", "<ref-object>", "<video>", "  ", "\n",
    "<|endoftext|>", "é", "\u0301", "你好", "🙂", "",
)  # fmt: skip
"""Texts that a template or a tokenizer may treat otherwise than words."""


def text(rng: random.Random) -> str:
    words = [rng.choice(("sea", "A hill.", "12,345", "the", "ok\n\n", *MARKS)) for _ in range(rng.randint(1, 30))]
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
    asked = [message for message in messages if message["role"] == "user"]
    if rng.random() < 0.1:
        messages = messages[-1:]
        asked = messages
    for number in range(num_images):
        rng.choice(asked)["content"] += f"<image>{number}"
    return {"messages": messages, **({"images": [f"{n}.png" for n in range(num_images)]} if num_images else {})}


@pytest.fixture
def samples(write_run, tmp_path):
    """Return a function that writes records and opens what measures them, by a model's template."""

    def open_(of, records, **template):
        data = str(write_lines(tmp_path / "records.jsonl", records))
        training = {"packing_length_precompute_workers": 1}
        return measurer_of(write_run(of, custom={"train_jsonl": data}, template=template, training=training))[0]

    return open_


@pytest.mark.slow
@pytest.mark.parametrize("of", ["qwen2", "qwen3", "qwen2_5_vl", "qwen3_vl"])
def test_texts_measure_as_full_encodes_do(of, samples, tmp_path):
    """Whatever the turns, the marks in them and where images stand, also truncated."""
    rng = random.Random(of)  # noqa: S311
    most = 3 if of.endswith("vl") else 0
    for number in range(most):
        Image.new("RGB", (40 + 90 * number, 100)).save(tmp_path / f"{number}.png")
    records = [record(rng, rng.randint(0, most)) for _ in range(50)]
    scale = {"qwen2": "all"}.get(of, "default")  # of a template that trains the first token too
    measured = samples(of, records, max_length=700, truncation_strategy="right", loss_scale=scale)

    in_full, quick = (list(measured.measure_many(range(50), in_full=way)) for way in (True, False))

    assert in_full == quick
    lengths = [one.measurement for one in quick if isinstance(one, MeasuredSample)]
    assert len(lengths) > 40
    assert 5 < sum(one.cut for one in lengths) < 25


def test_few_samples_are_encoded(samples):
    """Whatever their number: a few that prove the way, the first of each kind, one in hundreds."""
    measured = samples("qwen2", [record(random.Random(6))] * 600)  # noqa: S311
    calls, encode = [], measured._encoder.template.encode
    measured._encoder.template.encode = lambda *args, **options: calls.append(args) or encode(*args, **options)

    assert 1 == len(set(measured.measure_many(range(600), in_full=False)))

    # Two that prove the template, the first of its kind, and number 512.
    assert 4 == len(calls)


@pytest.mark.parametrize("number", [0, 70])
def test_a_count_that_is_wrong_is_found_by_the_audit(number, samples, monkeypatch):
    """The first record of a kind is encoded too, wherever it stands."""
    plain = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    turns = {"messages": plain["messages"] * 3}
    records = [plain] * 100
    records[number] = turns
    measured = samples("qwen2", records)
    ends = PieceCounter._count_trained_ends
    # Right for what proves the way: one turn, and two.
    monkeypatch.setattr(PieceCounter, "_count_trained_ends", lambda self, parts: len(parts) < 6 and ends(self, parts))

    with pytest.raises(ShortcutError, match=rf"line {number + 1} measured .* but encodes to"):
        list(measured.measure_many(range(100), in_full=False))


def test_a_template_with_ways_of_its_own_encodes_each_sample(samples, monkeypatch):
    """And says which way it is."""
    records = [record(random.Random(n)) for n in range(3)]  # noqa: S311
    measured = samples("qwen2", records)
    template = measured._encoder.template

    class Own(Template):
        def _tokenize(self, context, **kwargs):
            return super()._tokenize(context, **kwargs) * 2

    monkeypatch.setattr(template, "__class__", Own)

    assert (None, "its template has a way of its own to tokenize") == prove_pieces(template, tokens={})
    assert list(measured.measure_many(range(3), in_full=True)) == list(measured.measure_many(range(3), in_full=False))
