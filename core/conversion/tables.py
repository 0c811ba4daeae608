"""
Tables of ms-swift's arguments: keys of this project, and reasons against the others. Every argument
is in one of these tables, a key of `training.`, or a case of `core.conversion.special`.
"""

from __future__ import annotations

from collections.abc import Mapping

from packplan.core.conversion.launch import INSIDE

SECTIONS: Mapping[str, str] = {
    **dict.fromkeys(
        ("model", "model_type", "torch_dtype", "experts_impl", "bnb_4bit_compute_dtype", "bnb_4bit_quant_type",
         "bnb_4bit_use_double_quant"), "model",
    ),
    **dict.fromkeys(("template", "max_length", "max_pixels", "agent_template", "loss_scale"), "template"),
    **dict.fromkeys(("columns", "dataset_shuffle", "split_dataset_ratio", "model_name", "model_author"), "custom"),
}  # fmt: skip
"""Argument -> section of the key of the same name and meaning, where that is not `training`."""

UNNEEDED: Mapping[str, str] = {
    "task_type": "it is what is trained here",
    "max_model_len": "template.max_length says it",
    "disable_ignore_empty_think": "template.loss_scale says it",
    "dataset_num_proc": "records are read where they are; training.packing_length_precompute_workers says who measures",
    "load_from_cache_file": "lengths are kept and known again by the records' content",
    "download_mode": "model.download says whether anything is downloaded",
    "lazy_tokenize": "samples are always encoded while training runs",
    "packing_num_proc": "one plan is made of all samples, in one process",
    "padding_free": "packs have no padding",
    "is_binary_loss_scale": "weights of single messages are always read",
    "padding_side": "packs have no padding, and padded batches are padded on the right",
    "remove_unused_columns": "records keep what they have, and the template takes what it needs",
    "stopping_strategy": "it is of custom mixes: see docs/mixing.md",
    "shuffle_buffer_size": "all samples are planned, so that none waits in a buffer",
    "streaming": "records are read in any order, and planned once; max_steps keeps its meaning",
    "val_dataset_shuffle": "an evaluation measures all of its samples, in any order",
    "disable_auto_column_mapping": "custom.columns names the columns, and nothing else renames them",
    "check_model": "it asks a hub whether the model's files are the newest, which needs a network",
    "add_version": "training.output_dir is taken as it is, so that a run goes on in it",
    "create_checkpoint_symlink": "training.resume_from_checkpoint: last finds the newest whole checkpoint",
    "ignore_args_error": "unknown arguments are refused",
    "strict": "a record that cannot be read always stops the run, unless custom.on_bad_record says otherwise",
    "use_swift_lora": "it is an older way to the same adapters",
    "tuner_backend": "adapters are always peft's",
    "use_hf": "both hubs' caches are looked into; the variable USE_HF says which comes first",
    "hub_token": "it is of the hub's own login; write no tokens into a YAML",
    "enable_npu_model_patch": "it only counts on Ascend devices",
    "group_by_length": "packs are already of like length",
    **dict.fromkeys(("load_args", "load_data_args"), "the YAML says all there is"),
    "average_tokens_across_devices": "the loss is always the mean over all tokens of all ranks",
    **dict.fromkeys(
        ("sortish_sampler", "train_dataloader_shuffle", "train_sampling_strategy"),
        "the order of packs is drawn again each epoch from training.seed",
    ),
    "logging_dir": "logs are written below training.output_dir; the variable TENSORBOARD_LOGGING_DIR names another",
    "stream": "it is of answers, and no answers are written",
    "bnb_4bit_quant_storage": "it is of weights that FSDP shards",
    "accelerator_config": "it is of loaders that share batches, and each rank loads its own here",
    "batch_eval_metrics": "an evaluation sums the loss and the accuracy of tokens as it goes",
    "dataloader_in_order": "batches always come in the order of the plan",
    "do_eval": "eval_strategy says whether evaluation runs",
    "do_predict": "nothing is predicted",
    "do_train": "training is what runs here",
    **dict.fromkeys(
        ("eval_accumulation_steps", "eval_do_concat_batches", "eval_use_gather_object", "prediction_loss_only"),
        "an evaluation keeps no predictions",
    ),
    "include_for_metrics": "an evaluation measures the loss and the accuracy of tokens",
    "label_names": "labels are those of the template",
    "length_column_name": "lengths are measured",
    "lisa_step_interval": "it is of lisa_activated_layers, which is not supported",
    "local_rank": "torchrun says which rank a process is",
    **dict.fromkeys(
        ("max_new_tokens", "temperature", "top_k", "top_p", "repetition_penalty", "num_beams", "stop_words", "logprobs",
         "top_logprobs", "structured_outputs_regex", "ds3_gather_for_generation", "response_prefix"),
        "it is of answers, and training writes none",
    ),
}  # fmt: skip
"""Arguments whose work is done in another way, or by itself."""

UNSUPPORTED: Mapping[str, str] = {
    "model_revision": "name the folder of that revision in model.model",
    "new_special_tokens": "add them to the model's tokenizer first, and name that folder in model.model",
    **dict.fromkeys(("num_labels", "problem_type"), "classification is not trained"),
    "rope_scaling": "write it into the model's config.json",
    **dict.fromkeys(
        ("device_map", "max_memory"),
        "each rank holds the model on its own device: use training.deepspeed or training.fsdp",
    ),
    "local_repo_path": "models that need a repository's code are not loaded",
    "init_strategy": "name a model whose weights are all there",
    "norm_bbox": "boxes stay as the records have them",
    "template_backend": "templates are ms-swift's own",
    "enable_thinking": "set the variable ENABLE_THINKING instead",
    "preserve_thinking": "set the variable PRESERVE_THINKING instead",
    "add_non_thinking_prefix": "the template's own is used",
    "interleave_prob": "write the shares as a mix: see docs/mixing.md",
    "custom_dataset_info": "name the data files in dataset",
    "hqq_axis": "quantisation by hqq is not offered: use bnb",
    "adapters": "training does not begin from adapters: merge them first (swift export --merge_lora true)",
    **dict.fromkeys(("external_plugins", "custom_register_path"), f"it runs Python code of its own; with it, {INSIDE}"),
    "model_kwargs": "set them as variables of the environment, in capitals",
    "deepspeed_autotp_size": "several ranks would be one learner: remove it",
    **dict.fromkeys(("use_ray", "ray_exp_name", "device_groups"), "start the ranks with torchrun"),
    "sequence_parallel_size": "every rank trains samples of its own",
    "packing_length": "packs are as long as template.max_length: set that",
    "resume_only_model": "name the checkpoint in model.model, and leave resume_from_checkpoint out",
    "loss_type": "the loss is the cross entropy",
    "use_galore": "its gradients are not tried with packs",
    **dict.fromkeys(
        ("eval_dataset", "eval_dataset_args", "eval_generation_config", "eval_limit", "extra_eval_args"),
        "an evaluation measures the loss of val_dataset: run swift eval on a checkpoint",
    ),
    **dict.fromkeys(("bf16_full_eval", "fp16_full_eval"), "an evaluation computes as training does"),
    "mrl_dims": "embeddings are not trained",
    "lisa_activated_layers": "layers that change while training runs are not tried with packs",
}
"""Arguments that ask for something that is not done here, and what to do instead."""

UNSUPPORTED_PREFIXES: Mapping[tuple[str, ...], str] = {
    ("swanlab_",): "set SwanLab up by its own variables",
    ("decision_",): "it is of decision data",
    ("lora_ga_",): "other starts of adapters are not offered",
    ("adalora_", "reft_"): "it is of a tuner that is not offered",
    ("galore_",): "its gradients are not tried with packs",
}
"""Beginnings of arguments -> why they are not supported."""

PARTS_OF: Mapping[str, str] = {
    "fsdp_config": "fsdp",
    "gradient_checkpointing_kwargs": "gradient_checkpointing",
    **dict.fromkeys(
        ("hub_always_push", "hub_model_id", "hub_private_repo", "hub_revision", "hub_strategy"), "push_to_hub"
    ),
    "liger_kernel_config": "use_liger_kernel",
}
"""Arguments that nothing reads without another one -> that one."""

EVALUATION = frozenset(
    {"eval_delay", "eval_on_start", "eval_steps", "eval_strategy", "early_stop_interval", "load_best_model_at_end",
     "greater_is_better", "metric_for_best_model", "per_device_eval_batch_size"}
)  # fmt: skip
"""Arguments that nothing reads without evaluation data."""

TRACKIO = ("project", "trackio_bucket_id", "trackio_space_id", "trackio_static_space_id")
"""Arguments that nothing reads without trackio."""

BNB = ("bnb_4bit_compute_dtype", "bnb_4bit_quant_storage", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant")
"""Arguments that nothing reads without the quantisation of bitsandbytes."""

SEEING = frozenset({"max_pixels", "vit_gradient_checkpointing"})
"""Arguments that nothing reads where the model takes no images."""

KEPT = frozenset(
    {"greater_is_better", "metric_for_best_model", "per_device_eval_batch_size", "vit_gradient_checkpointing"}
)
"""Arguments that are written even where nothing reads them: the settings stay ms-swift's."""
