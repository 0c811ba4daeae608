"""ms-swift's own settings, losses and first step for a command line."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path


def several(asked: list[tuple[str, list[str], str]]) -> int:
    """
    Call functions of this module, one after the other.

    Args:
        asked: Name of a function, and what it is called with: the words of a command, and a path.
    """
    for name, words, out in asked:
        assert not globals()[name](words, out)
    return 0


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


def steps(words: list[str], out: str) -> int:
    """Write the loss of each step of a command, as ms-swift trains it."""
    from swift.pipelines import SwiftSft

    Path(out).write_text(json.dumps([one["loss"] for one in SwiftSft(words).run()["log_history"] if "loss" in one]))
    return 0


def trained(runs: list[tuple[str, str, dict]], out: str) -> int:
    """
    Write which weights ms-swift trains, by name, of each model and its keys of tuners.

    Args:
        runs: Folder of a model, its name among the demo's, and keys.
        out: The file to write.
    """
    from swift.pipelines import SwiftSft

    found = []
    for folder, name, keys in runs:
        kind = name if name.endswith("vl") else "qwen2_5" if name == "qwen2" else name
        words = ["--model", folder, "--model_type", name, "--template", kind, "--dataset", "none.jsonl",
                 "--output_dir", f"{out}.runs", "--report_to", "none"]  # fmt: skip
        for key, value in keys.items():
            words += [f"--{key}", *map(str, value if isinstance(value, list) else [value])]
        pipeline = SwiftSft(words)
        model = pipeline.prepare_model(pipeline.args, pipeline.model)
        found.append(sorted(name for name, parameter in model.named_parameters() if parameter.requires_grad))
    Path(out).write_text(json.dumps(found))
    return 0


def save(words: list[str], out: str) -> int:
    """Save what ms-swift resolves from the words of a command, as it does at the start of a run."""
    from swift.arguments import SftArguments
    from swift.utils import parse_args

    arguments, _ = parse_args(SftArguments, words)
    arguments.output_dir = out
    arguments.save_args()
    return 0


def export(words: list[str]) -> int:
    """Run `swift export` on the words of a command."""
    from swift.pipelines import export_main

    export_main(words)
    return 0
