"""Weights that ms-swift trains, and its export of a model."""

import json
from pathlib import Path
from typing import Any


def described(model: Any) -> dict[str, float]:
    """Return each weight's name, shape and training -> whether it is not 0; its norm if frozen."""
    return {
        f"{name} {tuple(weight.shape)} {weight.requires_grad}": float(
            weight.any() if weight.requires_grad else weight.norm()
        )
        for name, weight in model.named_parameters()
    }


def trained(runs: list[tuple[str, str, dict]], out: str) -> int:
    """Write how ms-swift describes the weights of each model with its keys of tuners."""
    from swift.pipelines import SwiftSft

    found = []
    for folder, name, keys in runs:
        kind = name if name.endswith("vl") else "qwen2_5" if name == "qwen2" else name
        words = ["--model", folder, "--model_type", name, "--template", kind, "--dataset", "none.jsonl",
                 "--output_dir", f"{out}.runs", "--report_to", "none"]  # fmt: skip
        for key, value in keys.items():
            words += [f"--{key}", *map(str, value if isinstance(value, list) else [value])]
        pipeline = SwiftSft(words)
        found.append(described(pipeline.prepare_model(pipeline.args, pipeline.model)))
    Path(out).write_text(json.dumps(found))
    return 0


def export(words: list[str]) -> int:
    """Run `swift export` on the words of a command."""
    from swift.pipelines import export_main

    export_main(words)
    return 0
