"""
What a run is: frozen, validated once, every field with its unit and default.

`RunConfig` mirrors the YAML, section by section. Keys of `training.` that are ms-swift's or
transformers' own are in `TrainingConfig.trainer`, unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeAlias

import attrs

from packplan.core.config.rl import GrpoConfig, PolicyConfig
from packplan.core.samples import MAX_MESSAGES

PathText: TypeAlias = Annotated[str, "path"]
"""Path of a file or folder, in which `~` and `${NAME}` are replaced when the YAML is read."""

PACKING_BUFFER = 512

MAX_LINE_BYTES = 2**20
"""Bytes of a line of a data file, unless `custom.max_line_bytes` says otherwise."""

MAX_VIDEO_BYTES = 2**32
"""Bytes of a video's sampled frames, unless `custom.max_video_bytes` says otherwise."""


def _read_only(keys: Mapping[str, Any]) -> Mapping[str, Any]:
    return MappingProxyType(dict(keys))


@attrs.frozen(kw_only=True)
class ModelConfig:
    """`model.`: what is trained."""

    model: PathText
    """
    Folder of the model, its tokenizer and its processor; or its id, which the local caches of
    Hugging Face and ModelScope hold.
    """

    model_type: str | None = None
    """
    ms-swift's name of the architecture; unset, its registry says it, if it names exactly one for
    the model's folder or the architecture in its config.json. A text model that it does not know
    needs none.
    """

    attn_impl: str = "auto"
    """
    Attention backend: `varlen` attends to each sample of a pack by itself, without a mask; sdpa,
    eager, flex_attention and flash_attention_2 are transformers' own. `auto` takes the fastest
    under which a probe shows that the model keeps the samples of a pack apart, and equal to
    themselves alone. Packing refuses a model that does not.
    """

    torch_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Type of the weights; unset, the model's own."""

    trust_remote_code: bool = False
    """Run Python code that comes with the model's folder."""

    max_model_len: int | None = None
    """Tokens; the budget of a pack where `template.max_length` is not set."""

    download: bool = False
    """
    Let ms-swift download a model, or data of `custom.dataset`, that no local cache holds; otherwise
    nothing is fetched.
    """

    quant_method: Literal["bnb"] | None = None
    """Load quantised weights, under adapters (QLoRA); on a GPU alone."""

    quant_bits: int | None = None
    """Bits of a quantised weight: 4 or 8."""

    bnb_4bit_compute_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Type that 4-bit weights compute in; unset, that of the weights."""

    bnb_4bit_quant_type: Literal["fp4", "nf4"] = "nf4"
    """Kind of 4-bit weights."""

    bnb_4bit_use_double_quant: bool = True
    """Quantise the scales of 4-bit weights too."""


@attrs.frozen(kw_only=True)
class TemplateConfig:
    """`template.`: how a record becomes tokens."""

    template: str | None = None
    """
    ms-swift's name of the chat template; unset, its registry says it, if it names exactly one. A
    template that does not declare packing takes `training.packing: false`.
    """

    max_length: int | None = None
    """
    Tokens of a pack: the packing length; unset, `global_max_length`, else `model.max_model_len`.
    There is no `packing_length` key.
    """

    max_pixels: int | None = None
    """Pixels an image is scaled down to; unset, the processor's own limit."""

    fps: float | None = None
    """
    Frames that are sampled of a second of video, and that a second of listed frames has; unset,
    ms-swift's `FPS`, 2.
    """

    fps_min_frames: int | None = None
    """Fewest frames that are sampled of a video; unset, ms-swift's `FPS_MIN_FRAMES`, 4."""

    fps_max_frames: int | None = None
    """Most frames that are sampled of a video; unset, ms-swift's `FPS_MAX_FRAMES`, 768."""

    video_min_pixels: int | None = None
    """
    Pixels a frame of a video is scaled up to; unset, ms-swift's `VIDEO_MIN_TOKEN_NUM`, 128 tokens.
    """

    video_max_pixels: int | None = None
    """
    Pixels a frame of a video is scaled down to; unset, ms-swift's `VIDEO_MAX_TOKEN_NUM`, 768
    tokens.
    """

    video_total_pixels: int | None = None
    """
    Pixels all frames of a video may have together, each pair of frames counted once; unset, those
    of nine tenths of ms-swift's `MODEL_SEQ_LEN`, 128,000 tokens.
    """

    system: str | None = None
    """System prompt of records that bring none; unset, the template's."""

    agent_template: str | None = None
    """
    ms-swift's name of the notation of tools, their calls and answers; unset, the template's own.
    """

    loss_scale: str = "default"
    """
    ms-swift's name of what is trained, and how much each token weighs: `default` trains what the
    assistant says, `last_round` its last turn, `all` everything; behind it or alone, names of
    weights, as `last_round+hermes` or `ignore_empty_think`.
    """

    truncation_strategy: Literal["left", "right", "raise"] | None = None
    """
    Truncate samples above the limit at that end (such samples are long samples, and counted), or
    refuse them; unset, none is truncated: they are long samples.
    """


@attrs.frozen(kw_only=True)
class CustomConfig:
    """`custom.`: the data, and which trainer."""

    train_jsonl: tuple[PathText, ...] = ()
    """
    Data files, or patterns of their names (`data/*.parquet`): JSON Lines, JSON arrays, CSV, either
    of them packed (.gz, .zst), Parquet, folders of `datasets.save_to_disk`. Relative paths of
    images and videos start at the folder of their file. Needed, unless `fusion_config` names the
    data.
    """

    val_jsonl: tuple[PathText, ...] = ()
    """Data files of the evaluation; unset, there is none."""

    source_names: dict[PathText, str] = attrs.field(factory=dict)
    """
    Entries of `train_jsonl` and `val_jsonl` -> names under which their samples are counted, as
    `{data/chats.jsonl: chats}`; entries of one name are one source, and plans stay as they are.
    """

    dataset: tuple[str, ...] = ()
    """
    Data as ms-swift names them, in place of `train_jsonl`: a file, a folder or an id of a hub,
    perhaps with `:subset` and `#count` behind it.
    """

    val_dataset: tuple[str, ...] = ()
    """The same for the evaluation, in place of `val_jsonl`."""

    split_dataset_ratio: float = 0.0
    """Share of the records of `dataset` that is evaluated, where nothing else is."""

    data_seed: int = 42
    """Seed of what `#count` and `split_dataset_ratio` draw."""

    dataset_shuffle: bool = True
    """Draw at random; `false` draws from the front."""

    model_name: tuple[str, ...] = ()
    """
    What `swift/self-cognition` calls the model: a Chinese and an English name, or one for both.
    """

    model_author: tuple[str, ...] = ()
    """Whom it says to have made the model, in the same way."""

    fusion_config: PathText | None = None
    """
    A mix of data sets, another one each epoch (a YAML); of the rollout variant. A static plan takes
    what `packplan plan materialise` writes.
    """

    trainer_variant: Literal["sft", "rollout"] = "sft"
    """`sft` is Stage-1, from static plans; `rollout` packs while it trains."""

    object_field_order: Literal["desc_first", "geometry_first"] = "desc_first"
    """Order of what is said of each object of a dense caption."""

    use_summary: bool = False
    """Answer dense captions with their summary."""

    max_line_bytes: int = MAX_LINE_BYTES
    """
    Bytes of the longest record of a data file, its images aside; a longer one is refused before it
    is read. Encoding it takes 2 to 8 s a MiB, and up to 370 times its size in memory.
    """

    max_messages: int = MAX_MESSAGES
    """Messages of a record; more are refused."""

    max_video_s: float = 7200.0
    """Seconds of the longest video; a longer one is refused before it is decoded."""

    max_video_bytes: int = MAX_VIDEO_BYTES
    """
    Bytes that the sampled frames of a video may take before they are scaled, three a pixel; more
    are refused before they are decoded.
    """

    columns: dict[str, str] = attrs.field(factory=dict)
    """
    Names of the data's keys -> the names that records have, as `{q: query, a: response}`.
    """

    on_bad_record: Literal["stop", "skip"] = "stop"
    """
    What becomes of a record that cannot become a sample: the run stops, or it is left out, counted
    and named in the log, in `lengths.json` and by `plan show`.
    """

    max_bad_share: Decimal = Decimal("0.01")
    """Share of all records that may be left out; more stop the run."""

    records_cache: PathText | None = None
    """
    Folder of copies of Parquet and packed files, which are written once so that records can be read
    in any order; unset, `records` in `training.output_dir`.
    """

    media_cache: PathText | None = None
    """
    Folder that images of http and https URLs are fetched into, each once, so that training needs no
    network; runs may share it. Unset, URLs are refused.
    """

    rollout_reward: str | None = None
    """Scores the model's own answers, the best of which the rollout variant trains: one of
    `core.rl.REWARDS`, or `module:function`. Unset, the data are trained as they are."""

    rollout_completions: int = 4
    """Answers to each prompt."""

    rollout_keep: int = 1
    """The best so many answers of a prompt become training samples."""

    rollout_max_new_tokens: int = 64
    """Tokens of an answer."""

    rollout_temperature: float = 1.0
    """Temperature of the answers; above 0."""


@attrs.frozen(kw_only=True)
class TrainingConfig:
    """`training.`: packing, the batch, and the trainer's own settings."""

    output_dir: PathText
    """Folder of checkpoints, logs and plans."""

    packing: bool = True
    """`false` trains padded batches through the same trainer; the packing keys may stay."""

    packing_mode: Literal["static", "dynamic"] = "static"
    """Stage-1 is static, the rollout variant dynamic."""

    packing_algorithm: str = "constant_volume"
    """
    How samples are put into packs: one of `core.packers.ALGORITHMS`. `certified` finds the fewest,
    `balanced` makes packs of equal work, at most 0.5 % more of them.
    """

    packing_buffer: int = PACKING_BUFFER
    """
    Samples that are packed together; of dynamic packing: another value is refused in static mode.
    """

    packing_balance: Literal["auto", "step", "microbatch", "none"] = "auto"
    """
    Assign the packs of each optimizer step to its ranks by work: `step` gives every rank the same
    sum, `microbatch` makes each microbatch even, for ranks that wait for each other in each; `auto`
    takes `microbatch` under FSDP and under DeepSpeed from stage 2 on, else `step`; `none` takes
    packs as they come. Which packs a step has stays the same.
    """

    packing_group_by_work: int = 0
    """
    Optimizer steps of a window in which packs of like work come into one step, for ranks that have
    one pack each; 0 leaves steps as they are drawn. Grouped steps are biased: `show` says how much
    they differ.
    """

    packing_min_fill_ratio: Decimal = Decimal("0.65")
    """
    Packs filled below this share of the packing length are dropped; compared as the decimal it is.
    """

    packing_drop_last: bool = True
    """Whether packs filled below `packing_min_fill_ratio` are dropped."""

    packing_max_dropped_share: Decimal = Decimal("0.01")
    """
    Share of all tokens that may be in dropped packs: where more than one pack is dropped and they
    have more, planning ends with an error. 1 allows any.
    """

    packing_allow_single_long: bool = True
    """Give a sample of the packing length or more a pack of its own; `false` skips it."""

    eval_packing: bool | None = None
    """
    Whether evaluation is packed; unset, in Stage-1 and not in the rollout variant. Never without
    `packing`. The metric is the same either way.
    """

    packing_wait_timeout_s: float = 7200.0
    """
    Seconds in all, for training and evaluation data together, that other ranks wait for rank 0 to
    measure and plan, and rank 0 for other jobs that write the same folders; 0 means for ever.
    """

    packing_lengths_from: PathText | None = None
    """
    The `output_dir` of another run, whose lengths are taken over where this run has none: a series
    of compared runs measures once. It is only read, and has to have been measured from the same
    inputs.
    """

    packing_length_cache_persist_every: int | None = None
    """
    Samples between two flushes of the measured lengths; unset, it adapts to the size of the data
    set.
    """

    packing_length_precompute_workers: int = 8
    """
    Processes that measure, at most one a core; a short rest is measured in one. 1 measures in the
    main process.
    """

    effective_batch_size: int | None = None
    """
    Packs of one optimizer step over all ranks (samples, if not packing), which the ranks have to
    divide; unset, what the next two imply.
    """

    per_device_train_batch_size: int = 1
    """
    Batch of a rank. Packing forces it to 1, with a warning, and keeps the packs of a step by
    accumulation.
    """

    gradient_accumulation_steps: int | None = None
    """
    Batches of a rank in one optimizer step; unset, 1. Overridden where `effective_batch_size` is
    set, or packing forces the batch to 1.
    """

    per_device_eval_batch_size: int = 1
    """Samples of a padded evaluation batch; packed evaluation forces it to 1."""

    dataloader_drop_last: bool = False
    """Drop the packs that do not fill all ranks, instead of repeating packs from the front."""

    num_train_epochs: float = 3.0
    """Epochs; may be fractional."""

    max_steps: int = -1
    """Optimizer steps in total, if positive; overrides the epochs."""

    loss_reduction: Literal["token", "sample", "sqrt"] = "token"
    """
    What weighs the same in a step's loss, over all ranks: every token, every sample, or in between
    (`sqrt`: a token of a sample of n supervised tokens weighs n ** -0.5).
    """

    seed: int = 42
    """Seed of weights, dropout and the order of packs, which is drawn again each epoch."""

    resume_from_checkpoint: PathText | None = None
    """A checkpoint's folder, or `last` for the newest whole one of `output_dir`."""

    tuner_type: Literal["full", "lora"] = "full"
    """Train all weights, or low-rank adapters."""

    lora_rank: int = 8
    """Rank of the adapters."""

    lora_alpha: float = 32.0
    """An adapter's output is scaled by this over its rank."""

    lora_dropout: float = 0.05
    """Share of an adapter's inputs that are dropped, from 0 to below 1."""

    target_modules: tuple[str, ...] = ("all-linear",)
    """Modules that get an adapter: names, `all-linear` or `all-embedding`."""

    target_regex: str | None = None
    """Pattern of the names of modules that get an adapter, in place of `target_modules`."""

    target_parameters: tuple[str, ...] = ()
    """Parameters that get an adapter by themselves, as those of experts that are no modules."""

    modules_to_save: tuple[str, ...] = ()
    """Modules that are trained whole beside the adapters: names, `all-embedding` or `all-norm`."""

    use_rslora: bool = False
    """Scale adapters by the square root of their rank (rsLoRA)."""

    use_dora: bool = False
    """Train the magnitude of each weight beside its adapter (DoRA)."""

    lorap_lr_ratio: float | None = None
    """Learning rate of an adapter's second matrix over that of its first (LoRA+)."""

    freeze_llm: bool = False
    """Keep the language model's weights."""

    freeze_vit: bool = False
    """Keep the vision tower's weights."""

    freeze_aligner: bool = False
    """Keep the weights between the two."""

    freeze_parameters: tuple[str, ...] = ()
    """Beginnings of the names of weights that are kept, where all are trained."""

    freeze_parameters_regex: str | None = None
    """Pattern of the names of weights that are kept."""

    freeze_parameters_ratio: float = 0.0
    """Share of the weights that is kept, from the model's first on."""

    trainable_parameters: tuple[str, ...] = ()
    """Beginnings of the names of weights that are trained, whatever is kept."""

    trainable_parameters_regex: str | None = None
    """Pattern of the names of weights that are trained, whatever is kept."""

    trainer: Mapping[str, Any] = attrs.field(factory=dict, converter=_read_only)
    """
    Every other key of ms-swift's `Seq2SeqTrainingArguments`, and so of transformers, as it is,
    checked against its type.
    """


@attrs.frozen(kw_only=True)
class RunConfig:
    """One run, as its YAML says."""

    model: ModelConfig
    template: TemplateConfig
    custom: CustomConfig
    training: TrainingConfig
    policy: PolicyConfig = attrs.field(factory=PolicyConfig)
    grpo: GrpoConfig = attrs.field(factory=GrpoConfig)

    global_max_length: int | None = None
    """Tokens; sets `template.max_length` and `model.max_model_len` where these are not given."""

    @property
    def packing_length(self) -> int:
        """
        Tokens a pack may hold: `template.max_length`, else `model.max_model_len`, each else
        `global_max_length`.
        """
        length = self.template.max_length or self.global_max_length or self.model.max_model_len
        assert length is not None  # noqa: S101  # `faults` refuses a run without one
        return length

    @property
    def eval_packing(self) -> bool:
        """Whether evaluation is packed."""
        asked = self.training.eval_packing
        return self.training.packing and (self.custom.trainer_variant == "sft" if asked is None else asked)
