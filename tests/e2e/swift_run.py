"""What ms-swift itself makes of a command line: its settings, losses, and the loss of its first step."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path


def settings(words: list[str], out: str) -> int:
    """Write what ms-swift resolves from the words of a command, training arguments and all."""
    from swift.arguments import SftArguments
    from swift.utils import parse_args

    arguments, rest = parse_args(SftArguments, words)
    assert not rest, rest
    training = {
        field.name: getattr(arguments.training_args, field.name)
        for field in dataclasses.fields(arguments.training_args)
        if hasattr(arguments.training_args, field.name)
    }
    own = {
        name: getattr(arguments, name)
        for name in (
            "freeze_llm",
            "freeze_vit",
            "freeze_aligner",
            "max_length",
            "loss_scale",
            "lora_rank",
            "torch_dtype",
        )
    }
    Path(out).write_text(json.dumps({"training": training, "own": own}, default=str))
    return 0


def losses(words: list[str], out: str) -> int:
    """
    Write the loss of each sample, by its tokens, and that of the first step, as ms-swift computes
    them.
    """
    import torch
    from swift.pipelines import SwiftSft

    # It forks processes to map records, which takes longer than to read these.
    pipeline = SwiftSft(words)
    train, _ = pipeline.args.load_dataset()
    model = pipeline.model.eval()
    template = pipeline.template
    # ms-swift knows the ids of the released vocabularies alone; a tiny one has others.
    for name in ("image_token_id", "video_token_id"):
        if hasattr(template, name) and hasattr(pipeline.processor, name):
            setattr(template, name, getattr(pipeline.processor, name))
    alone = {}
    for row in train:
        sample = template.encode({name: value for name, value in row.items() if value is not None}, return_length=True)
        key = ",".join(map(str, sample["input_ids"]))
        batch = template.data_collator([sample])
        if template.model_meta.is_multimodal:
            template.model = model
            template.register_post_encode_hook([model])
        try:
            kept = {name: value for name, value in batch.items() if name not in {"text_position_ids", "length"}}
            with torch.no_grad():
                alone[key] = float(model(**kept).loss)
        finally:
            if template.model_meta.is_multimodal:
                template.remove_post_encode_hook()
    step = next(entry["loss"] for entry in pipeline.run()["log_history"] if "loss" in entry)
    Path(out).write_text(json.dumps({"alone": alone, "step": step}))
    return 0
