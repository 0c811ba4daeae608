"""What of a run decides its lengths, and its plans."""

from __future__ import annotations

import json

from packplan.core.config.run import CustomConfig, RunConfig, TemplateConfig
from packplan.core.fingerprint import Value
from packplan.core.policy import PlanPolicy
from packplan.core.work import WorkModel


def plan_policy(config: RunConfig, split: str, *, work: WorkModel | None = None) -> PlanPolicy:
    """
    Return how a run plans its split `train` or `eval`; evaluation never drops.

    Args:
        config: The run.
        split: `train` or `eval`.
        work: What samples cost, for algorithms whose packs depend on it.
    """
    training, is_train = config.training, split == "train"
    return PlanPolicy(
        packing_length=config.packing_length,
        packing=training.packing if is_train else config.eval_packing,
        algorithm=training.packing_algorithm,
        min_fill_ratio=training.packing_min_fill_ratio,
        drop_last=training.packing_drop_last and is_train,
        allow_single_long=training.packing_allow_single_long,
        seed=training.seed,
        max_dropped_share=training.packing_max_dropped_share,
        refuse_longer=config.template.truncation_strategy == "raise",
        work=work,
    )


def configured_inputs(template: TemplateConfig, custom: CustomConfig, *, packing_length: int) -> dict[str, Value]:
    """
    Name what of a configuration lengths depend on, as far as it can be told without opening the
    model.

    Where the template truncates, the limit decides lengths; to raise, or not, decides none.

    Args:
        template: How a record becomes tokens.
        custom: How records are read.
        packing_length: Tokens of a pack; it decides lengths only where the template truncates.
    """
    cut = template.truncation_strategy if template.truncation_strategy in {"left", "right"} else None
    return {
        "custom.object_field_order": custom.object_field_order,
        "custom.use_summary": custom.use_summary,
        "custom.columns": json.dumps(dict(custom.columns), sort_keys=True) if custom.columns else None,
        "template.system": template.system,
        "template.agent_template": template.agent_template,
        "template.loss_scale": template.loss_scale,
        "template.max_pixels": template.max_pixels,
        **_set_videos(template),
        "template.truncation_strategy": cut,
        "packing_length": packing_length if cut else None,
    }


def _set_videos(template: TemplateConfig) -> dict[str, Value]:
    """Return how videos are sampled, as far as the run says."""
    keys = ("fps", "fps_min_frames", "fps_max_frames", "video_min_pixels", "video_max_pixels", "video_total_pixels")
    named = {f"template.{key}": getattr(template, key) for key in keys if getattr(template, key) is not None}
    return {name: str(value) if isinstance(value, float) else value for name, value in named.items()}
