"""
Configuration of a run: frozen classes that mirror the YAML, one class for each section.

Each field declares the type, default, check and effect of its key (`core.config.keys`). The
docstring below a field is the text of its key in docs/configuration.md. Keys of `training.` that
belong to ms-swift or transformers are stored unchanged in `TrainingConfig.trainer`.
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeAlias, get_args

import attrs

from packplan.core.batch import count_row_groups, largest_degree
from packplan.core.config.keys import (
    above_0,
    at_least,
    from_0_below_1,
    from_0_to_1,
    key,
    key_metadata,
    must,
    one_of,
    valid_seed,
)
from packplan.core.config.remedies import name_arguments
from packplan.core.equality import BACKENDS
from packplan.core.fingerprint import Value
from packplan.core.packers import ALGORITHMS
from packplan.core.samples.shapes import RECORD_KEYS

Tuner: TypeAlias = Literal["full", "lora", "adapter", "boft", "dummy", "fourierft", "ia3", "llamapro", "vera"]

PathText: TypeAlias = Annotated[str, "path"]
"""Path of a file or folder. `~` and `${NAME}` are expanded when the YAML is read."""

COMMAND = "the command"
"""Noun for a command of ms-swift in messages."""

LOADS = "decides how the model is loaded, not what samples are"
_LIMITS = "decides which records are refused, not how long the others are"
_COPIES = "decides where copies are kept, not what they contain"
_STREAMS = "belongs to streams, which store neither lengths nor plans"
_SELECTS = "decides which samples an epoch has, which are stored with its plan"
_MEASURES = "decides how measuring proceeds, not its result"
_ACCEPTS = "decides whether a result is accepted, not what it is"
TRAINS = "decides how planned packs are trained"


_is_backend = must(
    lambda name: name in BACKENDS or bool({"/", "|"} & set(name)),  # kernels of a hub, paged ones
    f"one of {', '.join(BACKENDS)}",
)


TUNERS: tuple[str, ...] = get_args(Tuner)
"""Values of `training.tuner_type`."""


def _read_only(keys: Mapping[str, Any]) -> Mapping[str, Any]:
    return MappingProxyType(dict(keys))


@attrs.frozen(kw_only=True)
class ModelConfig:
    """`model.`: the model, and how it is loaded."""

    model: PathText = attrs.field(metadata=key_metadata(lengths="otherwise", plan=True))
    """
    Folder with the model, its tokenizer and its processor, or an id in a local cache of Hugging
    Face or ModelScope.
    """

    model_type: str | None = key(None, lengths="otherwise")
    """
    Architecture of the model, by its name in ms-swift. If unset, Packplan uses the only type that
    ms-swift's registry lists for the folder. Text models unknown to ms-swift need no type.
    """

    attn_impl: str = key("auto", neither=TRAINS, check=_is_backend)
    """
    Attention backend. `auto` selects the fastest backend that passes the probe, and `varlen`
    selects Packplan's own. All other names are backends of transformers.
    """

    torch_dtype: Literal["float32", "float16", "bfloat16"] | None = key(None, neither=LOADS)
    """Data type of the weights. If unset, the weights keep the data type of the model's files."""

    experts_impl: Literal["eager", "grouped_mm", "batched_mm"] | None = key(None, neither=LOADS)
    """
    Implementation of the experts in a mixture-of-experts model. If unset, transformers chooses.
    """

    trust_remote_code: bool = key(False, neither=LOADS)
    """Run Python code from the model's folder."""

    max_model_len: int | None = key(None, lengths="otherwise", plan=True, check=at_least(1))
    """
    Maximum number of tokens in a pack, if `template.max_length` and `global_max_length` are unset.
    """

    download: bool = key(False, neither=LOADS)
    """Let ms-swift download a model that is not in a local cache."""

    quant_method: Literal["bnb"] | None = key(None, neither=LOADS)
    """Load quantised weights, to train adapters on top (QLoRA). This needs a GPU."""

    quant_bits: int | None = key(None, neither=LOADS)
    """Number of bits of a quantised weight: 4 or 8."""

    bnb_4bit_quant_type: Literal["nf4", "fp4"] | None = key(None, neither=LOADS)
    """Number format of 4-bit weights. If unset, `nf4` is used."""

    bnb_4bit_use_double_quant: bool | None = key(None, neither=LOADS)
    """Also quantise the scales of 4-bit weights. If unset, they are quantised."""

    rope_scaling: str | None = key(
        None,
        neither=LOADS,
        check=must(lambda text: text.startswith("{"), 'JSON, as {"rope_type": "yarn", "factor": 2}'),
    )
    """
    JSON settings that scale rotary positions for longer texts. If `factor` is missing, ms-swift
    derives it from `model.max_model_len`.
    """

    new_special_tokens: tuple[str, ...] = key((), lengths="value if set")
    """
    Tokens to add to the vocabulary, with new weights. An entry may be a `.txt` file with several
    tokens.
    """


@attrs.frozen(kw_only=True)
class TemplateConfig:
    """`template.`: how records become tokens."""

    template: str | None = key(None, lengths="otherwise")
    """
    Chat template, by its name in ms-swift. If unset, the name in the model's `args.json` is used,
    else the only template that ms-swift's registry lists for the model. Templates that do not
    support packing need `training.packing: false`.
    """

    max_length: int | None = key(None, lengths="otherwise", plan=True, check=at_least(1))
    """
    Packing length: maximum number of tokens in a pack. If unset, `global_max_length` applies, else
    `model.max_model_len`.
    """

    max_pixels: int | None = key(None, lengths="value", check=at_least(1))
    """
    Maximum number of pixels of an image; larger images are scaled down. If unset, the processor's
    limit applies.
    """

    fps: float | None = key(None, lengths="value if set", check=above_0)
    """
    Number of frames sampled per second of video, and the assumed frame rate of videos given as
    lists of frames. The default is 2 (ms-swift's `FPS`).
    """

    fps_min_frames: int | None = key(None, lengths="value if set", check=at_least(1))
    """Minimum number of frames of a video. The default is 4 (ms-swift's `FPS_MIN_FRAMES`)."""

    fps_max_frames: int | None = key(
        None, lengths="value if set", check=must(lambda frames: frames >= 2, "at least 2: frames are taken in pairs")
    )
    """Maximum number of frames of a video. The default is 768 (ms-swift's `FPS_MAX_FRAMES`)."""

    video_min_pixels: int | None = key(None, lengths="value if set", check=at_least(1))
    """
    Minimum number of pixels of a frame; smaller frames are scaled up. The default is the pixels of
    128 tokens (ms-swift's `VIDEO_MIN_TOKEN_NUM`).
    """

    video_max_pixels: int | None = key(None, lengths="value if set", check=at_least(1))
    """
    Maximum number of pixels of a frame; larger frames are scaled down. The default is the pixels of
    768 tokens (ms-swift's `VIDEO_MAX_TOKEN_NUM`).
    """

    video_total_pixels: int | None = key(None, lengths="value if set", check=at_least(1))
    """
    Maximum number of pixels of all frames of a video; two frames count as one. The default is the
    pixels of 115,200 tokens (nine tenths of ms-swift's `MODEL_SEQ_LEN`, 128,000).
    """

    system: str | None = key(None, lengths="value")
    """
    System prompt for records without one: a text with `\\n` for line breaks, or a `.txt` file. If
    unset, the template's default prompt is used.
    """

    today: str | None = key(None, lengths="value if set")
    """
    Date that prompts state as today's date, such as `2026-11-28`. The key is required for templates
    that write today's date, such as those of Llama 3.2, Mistral and gpt-oss. A resumed run must
    have the same date.
    """

    agent_template: str | None = key(None, lengths="value")
    """
    Format of tools, tool calls and tool answers, by its name in ms-swift. If unset, the template's
    format is used.
    """

    loss_scale: str = key("default", lengths="value")
    """
    Which tokens are trained, by ms-swift's names: `default` trains the assistant's turns,
    `last_round` trains only its last turn, and `all` trains every token. A scheme of token weights
    can be added, as in `last_round+hermes`, or used alone.
    """

    add_non_thinking_prefix: bool | None = key(None, lengths="value if set")
    """
    If `false`, answers without thoughts stay as they are. By default, templates of hybrid thinking
    models add empty thoughts to such answers.
    """

    preserve_thinking: bool | None = key(None, lengths="value if set")
    """
    `true` keeps the thoughts of all answers. `false` keeps only the thoughts after the last
    question. If unset, the template and `loss_scale` decide.
    """

    disable_ignore_empty_think: bool | None = key(None, lengths="value if set")
    """
    `true` trains empty thoughts too. By default, templates of hybrid thinking models exclude empty
    thoughts from the loss.
    """

    use_chat_template: bool | None = key(None, lengths="value if set")
    """`false` encodes only the texts of records, without the chat template, as `swift pt` does."""

    truncation_strategy: Literal["left", "right", "raise"] | None = key(None, lengths="value")
    """
    End at which samples longer than the packing length are truncated; `raise` refuses such samples.
    If unset, samples are not truncated.
    """


@attrs.frozen(kw_only=True)
class CustomConfig:
    """`custom.`: the data, and whether packs are made before or while training."""

    train_jsonl: tuple[PathText, ...] = key((), lengths="otherwise")
    """
    Data files, patterns (`data/*.parquet`), folders of `datasets`, or URLs such as `s3://…`.
    Required unless `fusion_config` is set.
    """

    val_jsonl: tuple[PathText, ...] = key((), lengths="otherwise")
    """Data files of the evaluation, in the same forms as `train_jsonl`."""

    val_share: Decimal = key(Decimal(0), plan=True, check=from_0_below_1, stream="refused")
    """Share of the records held out for the evaluation, chosen by `seed`."""

    source_names: dict[PathText, str] = key(
        attrs.Factory(dict),
        neither="names sources in counts and figures",
        per_rank="names sources for `plan show`, by their paths",
        check=must(lambda name: bool(name.strip()), "a name"),
    )
    """Names of sources, as `plan show --all` prints them: `{data/chats.jsonl: chats}`."""

    fusion_config: PathText | None = key(None, neither=_SELECTS)
    """YAML file that describes a mix of data sets, or a curriculum of mixes."""

    fusion_schedule: Literal["planned"] | None = key(None, neither=_SELECTS, stream="refused")
    """
    `planned` draws and plans all epochs of `fusion_config` before training. Static packing of a mix
    requires this value.
    """

    trainer_variant: Literal["sft", "rollout"] = key("sft", plan=True)
    """`sft` plans all packs before training; `rollout` makes packs while training (a stream)."""

    object_field_order: Literal["desc_first", "geometry_first"] = key("desc_first", lengths="value")
    """Order within each object of a dense caption's answer: description or geometry first."""

    use_summary: bool = key(False, lengths="value")
    """Use the summary of a dense caption as the trained answer."""

    max_line_bytes: int = key(2**20, neither=_LIMITS, check=at_least(1))
    """Maximum size of a record's texts in bytes, without images. Longer records are refused."""

    max_video_s: float = key(7200.0, neither=_LIMITS, check=above_0)
    """Maximum length of a video in seconds. Longer videos are refused before decoding."""

    max_video_bytes: int = key(2**32, neither=_LIMITS, check=at_least(1))
    """
    Maximum size in bytes of a video's sampled frames at their original resolution. Larger videos
    are refused before decoding.
    """

    max_image_pixels: int = key(89_478_485, neither=_LIMITS, check=at_least(1))
    """Maximum number of pixels of an image file. Larger images are refused before decoding."""

    literal_image_tags: bool = key(False, neither=_LIMITS)
    """Keep `<image>` as text in records without images. By default, such a text is an error."""

    columns: dict[str, str | None] = key(attrs.Factory(dict), lengths="value", check=one_of(sorted(RECORD_KEYS)))
    """
    Rename keys of the data: `{q: query, a: response}` reads `q` as `query`. `{label: null}` ignores
    the key `label`, also inside messages.
    """

    on_bad_record: Literal["stop", "skip"] = key("stop", neither=_ACCEPTS, stream="refused")
    """
    Action for a record that cannot become a sample: `stop` with an error, or `skip` and count the
    record.
    """

    max_bad_share: Decimal = key(Decimal("0.01"), neither=_ACCEPTS, check=from_0_to_1, stream="refused")
    """Largest share of the records that may be skipped. If more are skipped, the run stops."""

    lengths: PathText | None = key(None, neither="names lengths that have the same fingerprint", stream="evaluation")
    """Table of lengths from `packplan measure`. Records in the table are not measured again."""

    records_cache: PathText | None = key(None, neither=_COPIES)
    """
    Folder for indices of large data files, and copies of files from URLs or in formats other than
    JSON Lines and Arrow. If unset, the folder is `records` in `training.output_dir`.
    """

    media_dir: PathText | None = key(None, lengths="otherwise")
    """
    Base folder for relative paths of images and videos. If unset, ms-swift's `ROOT_IMAGE_DIR` is
    used, else the folder of the data file.
    """

    media_cache: PathText | None = key(None, neither=_COPIES)
    """
    Folder for copies of images and videos from URLs. Each file is fetched once. If unset, media at
    URLs are refused.
    """

    @property
    def planned_mix(self) -> str | None:
        """Path of the mix file whose epochs are planned before training, or None."""
        return self.fusion_config if self.fusion_schedule else None


@attrs.frozen(kw_only=True)
class TrainingConfig:
    """`training.`: packing, batches, tuners and the trainer."""

    output_dir: PathText = attrs.field(metadata=key_metadata(neither="decides where results are kept"))
    """Folder of checkpoints, logs and plans."""

    packing: bool = key(True, plan=True)
    """
    `false` trains padded batches with the same trainer. The other packing keys may stay in the
    YAML.
    """

    packing_mode: Literal["static", "dynamic"] = key("static", neither=_STREAMS)
    """Must be `static` if `custom.trainer_variant` is `sft`, and `dynamic` if it is `rollout`."""

    packing_algorithm: str = key("constant_volume", plan=True, check=one_of(ALGORITHMS), stream="refused")
    """One of `core.packers.ALGORITHMS`."""

    packing_epochs: Literal["same", "replanned"] = key("same", plan=True, stream="refused")
    """
    `same`: every epoch trains the same packs. `replanned`: each epoch has new packs, drawn from
    `seed`.
    """

    packing_buffer: int = key(512, neither=_STREAMS, check=at_least(1))
    """
    Minimum number of samples that are packed together if `packing_mode` is `dynamic`, except at the
    end of an epoch. Static packing refuses any value but the default.
    """

    packing_balance: Literal["auto", "step", "microbatch", "none"] = key("auto", neither=TRAINS, stream="refused")
    """
    How a step's packs are assigned to ranks. `step`: all ranks have about equal work over the step.
    `microbatch`: all ranks have about equal work in each microbatch. `auto`: `microbatch` if ranks
    wait for each other after each microbatch (FSDP, DeepSpeed from stage 2 on), else `step`.
    `none`: packs keep the order of the epoch.
    """

    packing_min_fill_ratio: Decimal = key(Decimal("0.65"), plan=True, check=from_0_to_1)
    """Packs filled below this share (an exact decimal) of the packing length are dropped."""

    packing_drop_last: bool = key(True, plan=True)
    """
    Drop packs filled below `packing_min_fill_ratio`. Streams drop packs only at the end of an
    epoch.
    """

    packing_max_dropped_share: Decimal = key(Decimal("0.01"), neither=_ACCEPTS, check=from_0_to_1)
    """
    Largest share of all tokens that dropped packs may contain. A larger share is an error, unless
    only one pack is dropped.
    """

    packing_max_images: int | None = key(None, plan=True, check=at_least(1), stream="refused")
    """Maximum number of images in a pack. A sample with more images is a pack by itself."""

    packing_allow_single_long: bool = key(True, plan=True)
    """
    Put each sample of at least the packing length into a pack by itself; `false` skips such
    samples.
    """

    eval_packing: bool | None = key(None, plan=True)
    """
    Pack the evaluation data, which needs `packing: true`. The metric stays the same. If unset, the
    evaluation is packed with static plans, but not with streams.
    """

    packing_wait_timeout_s: float = key(7200.0, neither=_MEASURES, check=at_least(0), stream="evaluation")
    """
    Seconds from the start until a rank stops waiting; 0 sets no limit. Rank 0 waits for other jobs
    that write to the run's folders; all other ranks wait for rank 0, also while it measures. Each
    block that is measured on Ray may take as long.
    """

    packing_lengths_from: PathText | None = key(
        None, neither="names lengths that have the same fingerprint", stream="evaluation"
    )
    """
    `output_dir` of another run with the same inputs. Its lengths are used if this run has none.
    """

    packing_length_cache_persist_every: int | None = key(
        None, neither=_MEASURES, check=at_least(1), stream="evaluation"
    )
    """
    Number of samples after which their lengths are saved. If unset, the size of the data decides.
    """

    packing_length_precompute_workers: int = key(
        8, neither=_MEASURES, per_rank="depends on the machine's cores", check=at_least(1), stream="evaluation"
    )
    """Number of processes that measure lengths, at most one per CPU core."""

    packing_length_measured_by: Literal["processes", "ray"] = key("processes", neither=_MEASURES, stream="evaluation")
    """
    `ray` measures on all nodes of the Ray cluster at `RAY_ADDRESS`. If that variable is unset, Ray
    uses a cluster on this machine.
    """

    ray_address: str = key("auto", set_by_command=True)
    """Address of the Ray cluster, which `--ray` sets."""

    effective_batch_size: int | None = key(None, neither=TRAINS, check=at_least(1))
    """
    Number of packs in a step over all ranks; samples if `packing` is `false`. If unset,
    `per_device_train_batch_size` and `gradient_accumulation_steps` decide.
    """

    per_device_train_batch_size: int = key(1, neither=TRAINS, check=at_least(1))
    """
    Number of samples in a padded batch on each rank. With packing, a batch is one pack, and more
    batches are accumulated. A step then has as many packs as it would have samples without packing.
    """

    gradient_accumulation_steps: int | None = key(None, neither=TRAINS, check=at_least(1))
    """
    Number of batches of a rank in a step, unless `effective_batch_size` or packing decides. The
    default is 1.
    """

    per_device_eval_batch_size: int = key(1, neither=TRAINS, check=at_least(1))
    """Number of samples in a padded batch of the evaluation. A packed evaluation uses 1."""

    sequence_parallel_size: int | Literal["auto"] = key(
        1, neither=TRAINS, check=must(lambda size: size == "auto" or size >= 1, "at least 1, or auto"), stream="refused"
    )
    """
    Number of ranks that share each pack and count as one rank of the plan. With `auto`, only long
    packs are shared. The number of ranks is then the smallest power of two for which no rank has
    more tokens than the packing length.
    """

    max_sequence_parallel_size: int | None = key(
        None,
        neither=TRAINS,
        check=must(lambda size: size > 0 and size.bit_count() == 1, "a power of two"),
        stream="refused",
    )
    """
    Maximum number of ranks that share a pack if `sequence_parallel_size` is `auto`. The default is
    the largest power of two that divides the number of ranks.
    """

    dataloader_drop_last: bool = key(False, neither=TRAINS, stream="refused")
    """
    Drop the plan's last packs if they do not fill all ranks. `false` repeats the first packs
    instead.
    """

    num_train_epochs: float = key(3.0, neither=TRAINS)
    """Number of epochs, which may be fractional except in streams."""

    max_steps: int = key(
        -1, neither=TRAINS, check=must(lambda steps: steps == -1 or steps >= 1, "at least 1, or -1 for no limit")
    )
    """
    Total number of optimizer steps, which replaces `num_train_epochs`. With -1, the epochs decide.
    """

    loss_reduction: Literal["token", "sample", "sqrt"] = key("token", neither=TRAINS)
    """
    Weights in a step's loss over all ranks. `token`: all supervised tokens have equal weight.
    `sample`: all samples have equal weight. `sqrt`: the weight of a sample is the square root of
    its number of supervised tokens.
    """

    seed: int = key(42, plan=True, check=valid_seed)
    """
    Seed of all random choices: new weights, dropout, the draws of samples and packs, and the order
    of packs in each epoch. If `data_seed` is set, it decides the order instead.
    """

    resume_from_checkpoint: PathText | None = key(None, neither=TRAINS)
    """Folder of a checkpoint, or `last` for the newest complete checkpoint in `output_dir`."""

    tuner_type: Tuner = key("full", plan=True)
    """
    Which weights are trained: all weights (`full`), low-rank adapters (`lora`), or the weights that
    another tuner of ms-swift adds. `dummy` trains the weights that the model's loader leaves
    unfrozen.
    """

    freeze_llm: bool = key(False, plan=True)
    """Freeze the language model."""

    freeze_vit: bool = key(False, plan=True)
    """Freeze the vision tower."""

    trainer: Mapping[str, Any] = attrs.field(factory=dict, converter=_read_only, metadata=key_metadata(neither=TRAINS))
    """
    All other keys of ms-swift's `Seq2SeqTrainingArguments` and tuners. Their types are checked, and
    their values are passed on unchanged.
    """

    @property
    def shares_by_degree(self) -> bool:
        """Whether the length of each pack decides how many ranks share it."""
        return self.sequence_parallel_size == "auto"

    @property
    def row_ranks(self) -> int:
        """Number of ranks that share every pack and count as one rank of the plan."""
        return 1 if self.sequence_parallel_size == "auto" else self.sequence_parallel_size

    @property
    def adds_weights(self) -> bool:
        """Whether the tuner trains only added weights, and none of the model's original weights."""
        return self.tuner_type not in {"full", "dummy"}


@attrs.frozen(kw_only=True)
class HostCommand:
    """ms-swift command that trains a run in place of `packplan sft`."""

    task: str
    """`sft`, `pt` or `rlhf`; empty in the processes that the command itself runs."""

    words: tuple[str, ...]
    """Command-line arguments after the task."""

    world_size: int
    """Number of data-parallel ranks. Processes that share each row count as one rank."""

    task_type: str
    """Kind of model that is trained, such as `causal_lm`."""

    sequences_per_row: int
    """
    Number of sequences in a row: 2 for preference pairs, 0 if the number differs between rows.
    """

    length_inputs: Mapping[str, Value]
    """Arguments that lengths depend on, for the fingerprint of lengths."""


@attrs.frozen(kw_only=True)
class RunConfig:
    """Configuration of a run, with all sections of its YAML."""

    model: ModelConfig
    template: TemplateConfig
    custom: CustomConfig
    training: TrainingConfig

    global_max_length: int | None = key(None, lengths="otherwise", plan=True, check=at_least(1))
    """Maximum number of tokens in a pack, if `template.max_length` is unset."""

    source: str = attrs.field(default="", eq=False, metadata=key_metadata(set_by_command=True))
    """Name of the YAML, for messages; empty for a run without a YAML."""

    command: HostCommand | None = key(None, set_by_command=True)
    """ms-swift command that trains the run; None for `packplan sft`."""

    @property
    def packing_length(self) -> int:
        """
        Maximum number of tokens in a pack: `template.max_length`, else `global_max_length`, else
        `model.max_model_len`.
        """
        length = self.template.max_length or self.global_max_length or self.model.max_model_len
        assert length is not None  # noqa: S101  # `run_faults` refuses a run without one
        return length

    @property
    def batch_size(self) -> int:
        """Number of packs in one forward pass of a rank; samples if `training.packing` is false."""
        # A batch size of ms-swift counts packs.
        return 1 if self.training.packing and self.command is None else self.training.per_device_train_batch_size

    def count_ranks(self, asked: int | None = None) -> int | None:
        """
        Return the number of data-parallel ranks of the command, or *asked* if there is no command.
        """
        return self.command.world_size if self.command else asked

    def name_settings(self, text: str) -> str:
        """
        Return a message with YAML keys or, if a command of ms-swift trains the run, with the
        command's arguments.
        """
        return name_arguments(text) if self.command else text

    def plan_world_size(self, num_ranks: int) -> int:
        """
        Return the number of groups of ranks that share packs. Raise an ArgumentError if a group
        would be incomplete, or if the maximum degree does not divide the number of ranks.
        """
        if self.training.shares_by_degree:
            largest_degree(num_ranks, self.training.max_sequence_parallel_size)
        return count_row_groups(num_ranks, self.training.row_ranks)

    @property
    def eval_packing(self) -> bool:
        """Whether the evaluation data is packed."""
        asked = self.training.eval_packing
        return self.training.packing and (self.custom.trainer_variant == "sft" if asked is None else asked)
