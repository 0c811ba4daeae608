"""Records as prompts of TRL: the messages before the last, media at their tags, the own answer."""

import PIL.Image
import pytest

from packplan.adapters.samples.data_files import open_records
from packplan.adapters.samples.prompts import Prompts
from packplan.core.config.run import CustomConfig
from packplan.core.errors import RecordError
from tests.records import ANSWER, QUESTION, asked, chat, write_lines


@pytest.fixture
def open_prompts(tmp_path):
    """Return a function that opens records as prompts, beside one picture."""
    PIL.Image.new("L", (8, 6)).save(tmp_path / "one.png")

    def open_one(*records, system=None, sees=False, **custom):
        path = write_lines(tmp_path / "data.jsonl", records)
        return Prompts(open_records((str(path),)), CustomConfig(**custom), system=system, sees=sees)

    return open_one


def test_a_prompt_is_what_comes_before_the_answer(open_prompts):
    """Word for word, with the system prompt where the record has none; rewards get the record."""
    turns = [QUESTION, {"role": "assistant", "content": "2"}, {"role": "user", "content": "4?"}]
    own = {"role": "system", "content": "own"}
    records = [chat(*turns, ANSWER, level=3), chat(own, *turns, ANSWER)]
    first, second = open_prompts(*records, system="Count.")

    assert [{"role": "system", "content": "Count."}, *turns] == first["prompt"]
    assert [own, *turns] == second["prompt"]
    assert (ANSWER["content"], records[0]) == (first["answer"], first["record"])
    assert "images" not in first


def test_a_prompt_alone_is_a_record(open_prompts):
    """As TRL has them for GRPO: text or messages, beside columns that a reward reads."""
    own = [{"role": "system", "content": "Add."}, QUESTION]
    records = [{"prompt": QUESTION["content"]}, {"prompt": own, "ground_truth": "4", "level": 3}]

    first, second = open_prompts(*records, system="Count.")

    assert [{"role": "system", "content": "Count."}, QUESTION] == first["prompt"]
    assert (own, "", records[1]) == (second["prompt"], second["answer"], second["record"])
    (mapped,) = open_prompts({"q": QUESTION["content"]}, columns={"q": "prompt"})
    assert ([QUESTION], "") == (mapped["prompt"], mapped["answer"])


@pytest.mark.parametrize(("key", "columns"), [("target", {}), ("Answer", {}), ("gold", {"gold": "response"})])
def test_a_prompt_keeps_an_answer_of_any_name(open_prompts, key, columns):
    """Rewards get the answer of each column that is one in training, also of a mapped one."""
    (item,) = open_prompts({"prompt": QUESTION["content"], key: "4"}, columns=columns)

    assert ([QUESTION], "4") == (item["prompt"], item["answer"])


def test_images_stand_at_their_tags(open_prompts):
    """From files beside the data, or held by the record; without one, a tag may be text."""
    records = asked("a<image>b<image>", images=["one.png", "one.png"]), asked("say")
    with_two, without = open_prompts(*records, sees=True)

    assert ["text", "image", "text", "image"] == [part["type"] for part in with_two["prompt"][0]["content"]]
    assert [("RGB", (8, 6))] * 2 == [(image.mode, image.size) for image in with_two["images"]]
    assert ([{"type": "text", "text": "say"}], []) == (without["prompt"][0]["content"], without["images"])
    written = {"literal_image_tags": True, "columns": {"q": "query"}}
    (prompt,) = open_prompts({"q": "what is <image>?", "response": "so."}, sees=True, **written)
    assert [{"type": "text", "text": "what is <image>?"}] == prompt["prompt"][0]["content"]


@pytest.mark.parametrize(
    ("record", "sees", "says"),
    [
        (chat(ANSWER), False, "has no question before its last message"),
        (asked("<image>", images=["one.png"]), False, "has images, but the model reads text only"),
        (asked("<image>", images=["gone.png"]), True, "line 2: the image .*gone.png does not exist"),
        (chat(videos=["a.mp4"]), True, "has videos or tools"),
        (chat(QUESTION), False, "does not end with an assistant message"),
        (asked("<image>", images=["https://x.org/a.png"]), True, r"\(custom.media_cache\)|media_cache"),
    ],
)
def test_a_record_that_is_no_prompt_is_named(open_prompts, record, sees, says):
    """By its file and line, with what is wrong."""
    with pytest.raises(RecordError, match=says, check=lambda one: "line 2" in one.where):
        open_prompts(chat(), record, sees=sees)[1]
