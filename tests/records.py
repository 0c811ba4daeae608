"""Records that several tests begin with."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from packplan.core.samples import records
from packplan.core.samples.shapes import to_shape

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.text(alphabet='[]{}",\\ a', max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
"""Values of JSON, with texts that look like its own notation."""

QUESTION = {"role": "user", "content": "why?"}

ANSWER = {"role": "assistant", "content": "so."}


def chat(*messages: Any, **more: Any) -> dict[str, Any]:
    """Return a record of these messages, else of a question and its answer, and of more keys."""
    return {"messages": [*(messages or (QUESTION, ANSWER))], **more}


def asked(content: Any, **more: Any) -> dict[str, Any]:
    """Return a record whose user says this, and of more keys."""
    return chat({"role": "user", "content": content}, ANSWER, **more)


def to_messages(record: object, columns: Mapping[str, str | None] | None = None, **options: Any) -> dict[str, Any]:
    """Convert a record into messages, with columns and options as the section `custom` has them."""
    return records.to_messages(to_shape(record, columns), records.MessageOptions(**options))


def write_lines(path: Path, records: Iterable[object]) -> Path:
    """Write records as JSON Lines, and return the path."""
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path
