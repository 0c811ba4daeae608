"""Weights that ms-swift trains, and its export of a model."""

import json
from pathlib import Path


def trained(runs: list[tuple[str, str, dict]], out: str) -> int:
    """Write which weights ms-swift trains, by name, of each model and its keys of tuners."""
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


def export(words: list[str]) -> int:
    """Run `swift export` on the words of a command."""
    from swift.pipelines import export_main

    export_main(words)
    return 0
