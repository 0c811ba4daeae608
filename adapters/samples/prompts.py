"""Converts records to prompts for TRL's trainers that generate answers, such as GRPO."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import PIL.Image

from packplan.adapters.samples.data_set import FileRecords, message_options
from packplan.adapters.samples.downloads import MediaCache, fetch_medium
from packplan.adapters.samples.media_files import read_image_size
from packplan.core.config.run import CustomConfig
from packplan.core.samples.media import Image
from packplan.core.samples.records import to_messages
from packplan.core.samples.shapes import MESSAGE_KEYS, RESPONSE_KEYS, rename_keys, to_shape
from packplan.core.samples.values import fail, has

_TAG = "<image>"

_ROLES = frozenset({"system", "user", "assistant"})


class Prompts:
    """
    Data set of prompts, in which each prompt has the index of its record.

    Each item is a dict. `prompt` has all messages of the record except the last. `answer` is the
    text of the last message. `record` is the record as it was read. For a vision model, the item
    also has the record's `images`.

    Reward functions get all keys except `prompt` as arguments. If a TRL record has a `prompt` but
    no answer, `answer` is empty. The prompt's messages are then used unchanged, and a prompt that
    is a text becomes one user message.
    """

    def __init__(self, records: FileRecords, custom: CustomConfig, *, system: str | None, sees: bool) -> None:
        """
        Provide the records of a data set as prompts.

        Args:
            records: Records of the data set.
            custom: Section `custom`, which decides how a record is read.
            system: System prompt for records that have none.
            sees: Whether the model accepts images.
        """
        self._records, self._system, self._sees = records, system, sees
        self._columns, self._options = custom.columns, message_options(custom)
        PIL.Image.MAX_IMAGE_PIXELS = custom.max_image_pixels
        self._media = MediaCache(Path(custom.media_cache)) if custom.media_cache else None

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return the item of record *index*; RecordError if the record has no prompt."""
        record = self._records[index]
        with self._records.wrap_errors(index, "the record "):
            asked = rename_keys(record, self._columns) if isinstance(record, Mapping) else {}
            is_prompt = has(asked, "prompt") and not any(has(asked, name) for name in (*MESSAGE_KEYS, *RESPONSE_KEYS))
            shaped = to_shape(_with_answer(asked) if is_prompt else record, self._columns)
            sample = to_messages(shaped, self._options)
            messages, answer = self._split_answer(sample)
        found = {"prompt": messages, "answer": "" if is_prompt else answer, "record": record}
        if not self._sees:
            return found
        with self._records.wrap_errors(index):
            images = [self._load_image(index, image) for image in sample.get("images", ())]
        for message in messages:
            message["content"] = _split_text(message["content"], tagged=bool(images))
        return {**found, "images": images}

    def _split_answer(self, sample: Mapping[str, Any]) -> tuple[list[dict[str, Any]], str]:
        """Split a sample into prompt messages and answer; ValueError if TRL cannot use it."""
        *messages, last = sample["messages"]
        if {"videos", "tools"} & set(sample) or not {message["role"] for message in messages} <= _ROLES:
            fail("has videos or tools, which TRL's trainer does not accept as data: remove the record")
        if "images" in sample and not self._sees:
            fail("has images, but the model reads text only: name a vision model in model.model")
        if not any(message["role"] == "user" for message in messages):
            fail("has no question before its last message: add a user message")
        if self._system and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self._system}, *messages]
        return [{name: message[name] for name in ("role", "content")} for message in messages], last["content"]

    def _load_image(self, index: int, image: Image) -> PIL.Image.Image:
        """Load an image from bytes, a URL, or a path relative to the record's media folder."""
        path = fetch_medium(image, self._records.media_folder(index), self._media)
        read_image_size(path)
        return PIL.Image.open(io.BytesIO(path) if isinstance(path, bytes) else path).convert("RGB")


def _with_answer(record: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a TRL record that has only a prompt to messages with a placeholder answer."""
    prompt = record["prompt"]
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    media = {name: record[name] for name in ("images", "image", "videos", "tools") if name in record}
    return {**media, "messages": [*asked, {"role": "assistant", "content": "-"}]}


def _split_text(text: str, *, tagged: bool) -> list[dict[str, str]]:
    """
    Split a message's text at image tags into parts, as chat templates of vision models expect.

    Args:
        text: Content of a message.
        tagged: Whether `<image>` in the text is a tag that an image replaces.
    """
    texts = text.split(_TAG) if tagged else [text]
    parts = [part for one in texts for part in ({"type": "image"}, {"type": "text", "text": one})]
    return [part for part in parts[1:] if part.get("text") != ""]
