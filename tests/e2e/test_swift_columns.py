"""
ms-swift's columns: those that a record may have, and those that are refused because they would be
ignored.
"""

from __future__ import annotations

from packplan.core.samples import REFUSED, SUPPORTED

OWN = {
    "add_eos", "reasoning_content", "reasoning", "thinking", "thinking_content",
    "functions",
    "loss_scale",
}  # fmt: skip
"""
Refused, though not a column of ms-swift's data sets of messages: read from a record by hand, or by
other programs.
"""


def test_every_column_of_ms_swift_is_supported_or_refused():
    """
    Those that it keeps, those that it takes for one of them, and the fields of what its templates
    read; and no others.
    """
    from dataclasses import fields

    from swift.dataset.preprocessor.core import MessagesPreprocessor, ResponsePreprocessor, RowPreprocessor
    from swift.template.template_inputs import StdTemplateInputs

    columns = {*RowPreprocessor.standard_keys, *MessagesPreprocessor().columns, *ResponsePreprocessor().columns}
    columns |= {field.name for field in fields(StdTemplateInputs)}

    assert columns == {*SUPPORTED, *REFUSED} - OWN - {"history", "summary"}
    assert not {*SUPPORTED} & {*REFUSED}
    assert OWN <= {*REFUSED}
