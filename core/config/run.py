"""
Configuration of a run: frozen classes that mirror the YAML, section by section.

Each key states its type, default, check and effect at its field (`core.config.keys`), and its
reference text below it. Keys of `training.` that belong to ms-swift or transformers are in
`TrainingConfig.trainer`, unchanged.
"""

from __future__ import annotations

import re
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
    pattern_faults,
    valid_seed,
)
from packplan.core.equality import BACKENDS
from packplan.core.packers import ALGORITHMS
from packplan.core.samples.shapes import RECORD_KEYS

Tuner: TypeAlias = Literal["full", "lora", "adapter", "boft", "dummy", "fourierft", "ia3", "llamapro", "vera"]

PathText: TypeAlias = Annotated[str, "path"]
"""Path of a file or folder, in which `~` and `${NAME}` are replaced when the YAML is read."""

LOADS = "decides how the model is loaded, not what samples are"
_LIMITS = "decides which records are refused, not how long the others are"
_COPIES = "decides where copies are kept, not what they hold"
_STREAMS = "belongs to streams, which store neither lengths nor plans"
_SELECTS = "decides which samples an epoch has, which are stored with its plan"
_MEASURES = "decides how measuring proceeds, not its result"
_ACCEPTS = "decides whether a result is accepted, not what it is"
TRAINS = "decides how planned packs are trained"
TUNES = "decides which weights are trained"


_is_backend = must(
    lambda name: name in BACKENDS or bool({"/", "|"} & set(name)),  # kernels of a hub, paged ones
    f"one of {', '.join(BACKENDS)}",
)


def _read_only(keys: Mapping[str, Any]) -> Mapping[str, Any]:
    return MappingProxyType(dict(keys))


@attrs.frozen(kw_only=True)
class ModelConfig:
    """`model.`: the model."""

    model: PathText = attrs.field(metadata=key_metadata(lengths="otherwise", plan=True))
    """
    Folder of model, tokenizer and processor, or an id in a local cache of Hugging Face or
    ModelScope.
    """

    model_type: str | None = key(None, lengths="otherwise")
    """
    ms-swift's name of the architecture; unset, the only one that its registry has for the folder.
    Text models unknown to it need none.
    """

    attn_impl: str = key("auto", neither=TRAINS, check=_is_backend)
    """
    Attention backend: `varlen` attends to each sample by itself; others are transformers'. `auto`
    takes the fastest that passes the probe.
    """

    torch_dtype: Literal["float32", "bfloat16", "float16"] | None = key(None, neither=LOADS)
    """Type of the weights; unset, the model's."""

    experts_impl: Literal["eager", "grouped_mm", "batched_mm"] | None = key(None, neither=LOADS)
    """How the experts of a mixture are computed; unset, transformers' choice."""

    trust_remote_code: bool = key(False, neither=LOADS)
    """Run Python code from the model's folder."""

    max_model_len: int | None = key(None, lengths="otherwise", plan=True, check=at_least(1))
    """Tokens of a pack, if `template.max_length` is unset."""

    download: bool = key(False, neither=LOADS)
    """Let ms-swift download a model that no local cache holds."""

    quant_method: Literal["bnb"] | None = key(None, neither=LOADS)
    """Load quantised weights under adapters (QLoRA); needs a GPU."""

    quant_bits: int | None = key(None, neither=LOADS)
    """Bits of a quantised weight: 4 or 8."""

    bnb_4bit_quant_type: Literal["nf4", "fp4"] | None = key(None, neither=LOADS)
    """Number format of 4-bit weights; unset, `nf4`."""

    bnb_4bit_use_double_quant: bool | None = key(None, neither=LOADS)
    """Also quantise the scales of 4-bit weights; unset, `true`."""

    rope_scaling: str | None = key(
        None,
        neither=LOADS,
        check=must(lambda text: text.startswith("{"), 'JSON, as {"rope_type": "yarn", "factor": 2}'),
    )
    """
    Scaling of positions to longer texts: JSON of its settings. Without a factor in it,
    `model.max_model_len` decides the factor.
    """

    new_special_tokens: tuple[str, ...] = key((), lengths="value if set")
    """
    Tokens to add to the vocabulary, each with weights of its own; a `.txt` file lists several.
    """


@attrs.frozen(kw_only=True)
class TemplateConfig:
    """`template.`: encoding of records."""

    template: str | None = key(None, lengths="otherwise")
    """
    ms-swift's name of the chat template; unset, that of the model's `args.json`, else the only one
    of its registry. Templates that do not declare packing need `training.packing: false`.
    """

    max_length: int | None = key(None, lengths="otherwise", plan=True, check=at_least(1))
    """
    Packing length, the tokens of a pack; unset, `global_max_length`, else `model.max_model_len`.
    """

    max_pixels: int | None = key(None, lengths="value", check=at_least(1))
    """Pixels to which larger images are scaled down; unset, the processor's."""

    fps: float | None = key(None, lengths="value if set", check=above_0)
    """
    Frames sampled from each second of a video; a list of frames has this rate too. Unset,
    ms-swift's `FPS`, 2.
    """

    fps_min_frames: int | None = key(None, lengths="value if set", check=at_least(1))
    """Fewest frames of a video; unset, ms-swift's `FPS_MIN_FRAMES`, 4."""

    fps_max_frames: int | None = key(
        None, lengths="value if set", check=must(lambda frames: frames >= 2, "at least 2: frames are taken in pairs")
    )
    """Most frames of a video; unset, ms-swift's `FPS_MAX_FRAMES`, 768."""

    video_min_pixels: int | None = key(None, lengths="value if set", check=at_least(1))
    """
    Pixels to which smaller frames are scaled up; unset, ms-swift's `VIDEO_MIN_TOKEN_NUM`, 128
    tokens.
    """

    video_max_pixels: int | None = key(None, lengths="value if set", check=at_least(1))
    """
    Pixels to which larger frames are scaled down; unset, ms-swift's `VIDEO_MAX_TOKEN_NUM`, 768
    tokens.
    """

    video_total_pixels: int | None = key(None, lengths="value if set", check=at_least(1))
    """
    Most pixels of a video's frames together, a pair of frames counted once; unset, nine tenths of
    ms-swift's `MODEL_SEQ_LEN`, 128,000 tokens.
    """

    system: str | None = key(None, lengths="value")
    """
    System prompt of records without one, or a `.txt` file that holds it; `\\n` is a line break.
    Unset, the template's.
    """

    today: str | None = key(None, lengths="value if set")
    """Date that a template writes into prompts as today's, such as `2026-11-28`."""

    agent_template: str | None = key(None, lengths="value")
    """ms-swift's notation of tools, calls and answers; unset, the template's."""

    loss_scale: str = key("default", lengths="value")
    """
    Trained tokens, by ms-swift's names: `default` trains the assistant's turns, `last_round` its
    last, `all` everything. Names of weights follow or stand alone: `last_round+hermes`.
    """

    add_non_thinking_prefix: bool | None = key(None, lengths="value if set")
    """In hybrid thinking templates, `false` adds no empty thoughts to answers that have none."""

    preserve_thinking: bool | None = key(None, lengths="value if set")
    """
    `true` keeps the thoughts of all answers, `false` only those after the last question; unset, by
    the template and `loss_scale`.
    """

    disable_ignore_empty_think: bool | None = key(None, lengths="value if set")
    """`true` trains empty thoughts too, which hybrid thinking templates leave out of the loss."""

    use_chat_template: bool | None = key(None, lengths="value if set")
    """`false` encodes only the texts of records, as `swift pt` does."""

    truncation_strategy: Literal["left", "right", "raise"] | None = key(None, lengths="value")
    """End at which longer samples are truncated; `raise` refuses them. Unset, they stay whole."""


@attrs.frozen(kw_only=True)
class CustomConfig:
    """`custom.`: the data, and the variant of the trainer."""

    train_jsonl: tuple[PathText, ...] = key((), lengths="otherwise")
    """
    Data files, patterns (`data/*.parquet`), folders of `datasets`; also at URLs, as `s3://…`.
    Relative media paths start at their file's folder. Needed without `fusion_config`.
    """

    val_jsonl: tuple[PathText, ...] = key((), lengths="otherwise")
    """Data files of the evaluation."""

    val_share: Decimal = key(Decimal(0), plan=True, check=from_0_below_1, stream="refused")
    """Share of the records that is held out for the evaluation, drawn by `seed`."""

    source_names: dict[PathText, str] = key(
        attrs.Factory(dict),
        neither="names sources in what is shown",
        per_rank="names sources for `plan show`, by their paths",
        check=must(lambda name: bool(name.strip()), "a name"),
    )
    """Names of data files, under which samples are counted: `{data/chats.jsonl: chats}`."""

    fusion_config: PathText | None = key(None, neither=_SELECTS)
    """YAML of a mix of data sets, or of a curriculum of mixes."""

    fusion_schedule: Literal["planned"] | None = key(None, neither=_SELECTS, stream="refused")
    """Draw and plan all epochs of `fusion_config` before training. Unset, a plan refuses a mix."""

    trainer_variant: Literal["sft", "rollout"] = key("sft", plan=True)
    """`sft` trains from static plans; `rollout` packs during training."""

    object_field_order: Literal["desc_first", "geometry_first"] = key("desc_first", lengths="value")
    """Order of description and geometry in dense captions."""

    use_summary: bool = key(False, lengths="value")
    """Answer dense captions with their summary."""

    max_line_bytes: int = key(2**20, neither=_LIMITS, check=at_least(1))
    """Largest number of bytes of a record's texts, without images; longer records are refused."""

    max_video_s: float = key(7200.0, neither=_LIMITS, check=above_0)
    """Longest video in seconds; longer ones are refused before decoding."""

    max_video_bytes: int = key(2**32, neither=_LIMITS, check=at_least(1))
    """
    Most bytes of a video's sampled frames before scaling; videos with more are refused before
    decoding.
    """

    max_image_pixels: int = key(89_478_485, neither=_LIMITS, check=at_least(1))
    """Most pixels of an image; larger images are refused before decoding."""

    literal_image_tags: bool = key(False, neither=_LIMITS)
    """Keep `<image>` as text in records without images; otherwise such records are refused."""

    columns: dict[str, str | None] = key(attrs.Factory(dict), lengths="value", check=one_of(sorted(RECORD_KEYS)))
    """
    The data's keys -> names of records, as `{q: query, a: response}`. `{label: null}` ignores a
    key, in messages too.
    """

    on_bad_record: Literal["stop", "skip"] = key("stop", neither=_ACCEPTS, stream="refused")
    """`stop` at a record that cannot become a sample, or `skip` and count it."""

    max_bad_share: Decimal = key(Decimal("0.01"), neither=_ACCEPTS, check=from_0_to_1, stream="refused")
    """Largest share of records that may be skipped; if more are bad, the run stops."""

    lengths: PathText | None = key(None, neither="names lengths that have the same fingerprint", stream="evaluation")
    """Table that `packplan measure` wrote; records in it are not measured again."""

    records_cache: PathText | None = key(None, neither=_COPIES)
    """
    Folder for copies of data files at URLs and of formats other than JSON Lines and Arrow, and for
    indices of large files; unset, `records` in `training.output_dir`.
    """

    media_dir: PathText | None = key(None, lengths="otherwise")
    """
    Folder where relative paths of images and videos start; unset, ms-swift's `ROOT_IMAGE_DIR`, else
    the folder of their data file.
    """

    media_cache: PathText | None = key(None, neither=_COPIES)
    """Folder for images and videos at URLs, fetched once. Unset, such media are refused."""

    @property
    def planned_mix(self) -> str | None:
        """Path of the mix whose epochs are planned before training; None if there is none."""
        return self.fusion_config if self.fusion_schedule else None


@attrs.frozen(kw_only=True)
class TrainingConfig:
    """`training.`: packing, batches and the trainer."""

    output_dir: PathText = attrs.field(metadata=key_metadata(neither="decides where results are kept"))
    """Folder of checkpoints, logs and plans."""

    packing: bool = key(True, plan=True)
    """`false` trains padded batches by the same trainer; packing keys may stay."""

    packing_mode: Literal["static", "dynamic"] = key("static", neither=_STREAMS)
    """`static` in the variant `sft`, `dynamic` in `rollout`."""

    packing_algorithm: str = key("constant_volume", plan=True, check=one_of(ALGORITHMS), stream="refused")
    """One of `core.packers.ALGORITHMS`."""

    packing_epochs: Literal["same", "replanned"] = key("same", plan=True, stream="refused")
    """
    `same`: every epoch has the packs of the first. `replanned`: each draws its own from `seed`.
    """

    packing_buffer: int = key(512, neither=_STREAMS, check=at_least(1))
    """Samples packed together in dynamic mode; static mode refuses other values."""

    packing_balance: Literal["auto", "step", "microbatch", "none"] = key("auto", neither=TRAINS, stream="refused")
    """
    Assign a step's packs to ranks by work: `step` for equal sums, `microbatch` for ranks that meet
    in each microbatch (FSDP, DeepSpeed from stage 2 on), `auto` for either, `none` as packs come.
    """

    packing_min_fill_ratio: Decimal = key(Decimal("0.65"), plan=True, check=from_0_to_1)
    """Packs filled below this share of the packing length, an exact decimal, are dropped."""

    packing_drop_last: bool = key(True, plan=True)
    """Drop packs below `packing_min_fill_ratio`; streams do so only at the end of an epoch."""

    packing_max_dropped_share: Decimal = key(Decimal("0.01"), neither=_ACCEPTS, check=from_0_to_1)
    """
    Largest share of the tokens that dropped packs may have; more, in at least two packs, is an
    error.
    """

    packing_max_images: int | None = key(None, plan=True, check=at_least(1), stream="refused")
    """Most images in one pack; a sample with more is a pack by itself."""

    packing_allow_single_long: bool = key(True, plan=True)
    """Give each sample of at least the packing length its own pack; `false` skips it."""

    eval_packing: bool | None = key(None, plan=True)
    """
    Pack the evaluation; unset, in static plans. It needs `packing`, and does not change the metric.
    """

    packing_wait_timeout_s: float = key(7200.0, neither=_MEASURES, check=at_least(0), stream="evaluation")
    """Seconds that ranks wait for rank 0, and rank 0 for other jobs in its folders; 0: for ever."""

    packing_lengths_from: PathText | None = key(
        None, neither="names lengths that have the same fingerprint", stream="evaluation"
    )
    """
    `output_dir` of another run with the same inputs; its lengths are read if this run has none.
    """

    packing_length_cache_persist_every: int | None = key(
        None, neither=_MEASURES, check=at_least(1), stream="evaluation"
    )
    """Samples between flushes of measured lengths; unset, by the size of the data."""

    packing_length_precompute_workers: int = key(
        8, neither=_MEASURES, per_rank="cores of a rank's machine", check=at_least(1), stream="evaluation"
    )
    """Number of processes that measure, at most one for each core."""

    effective_batch_size: int | None = key(None, neither=TRAINS, check=at_least(1))
    """
    Packs (without packing, samples) of a step over all ranks; unset, the next two keys decide.
    """

    per_device_train_batch_size: int = key(1, neither=TRAINS, check=at_least(1))
    """Batch of a rank. Packing forces 1; accumulation then keeps the packs of a step."""

    gradient_accumulation_steps: int | None = key(None, neither=TRAINS, check=at_least(1))
    """Batches of a rank in a step, unless `effective_batch_size` or packing decide; unset, 1."""

    per_device_eval_batch_size: int = key(1, neither=TRAINS, check=at_least(1))
    """Samples of a padded evaluation batch; packed evaluation forces 1."""

    sequence_parallel_size: int | Literal["auto"] = key(
        1, neither=TRAINS, check=must(lambda size: size == "auto" or size >= 1, "at least 1, or auto"), stream="refused"
    )
    """
    Ranks that share each row of packed samples, and count as one rank of the plan. `auto`: each
    long pack takes the smallest power of two of ranks that holds it, every other pack one rank.
    """

    max_sequence_parallel_size: int | None = key(
        None,
        neither=TRAINS,
        check=must(lambda size: size > 0 and size.bit_count() == 1, "a power of two"),
        stream="refused",
    )
    """
    Most ranks that share a pack where `sequence_parallel_size` is `auto`; unset, the largest power
    of two that divides the ranks.
    """

    dataloader_drop_last: bool = key(False, neither=TRAINS, stream="refused")
    """Drop packs that do not fill all ranks; `false` repeats packs from the front."""

    num_train_epochs: float = key(3.0, neither=TRAINS)
    """Epochs; may be fractional, but not in streams."""

    max_steps: int = key(
        -1, neither=TRAINS, check=must(lambda steps: steps == -1 or steps >= 1, "at least 1, or -1 for no limit")
    )
    """Optimizer steps in total, if positive; overrides epochs."""

    loss_reduction: Literal["token", "sample", "sqrt"] = key("token", neither=TRAINS)
    """Unit of equal weight in a step's loss over all ranks: token, sample, or between (`sqrt`)."""

    seed: int = key(42, plan=True, check=valid_seed)
    """Seed of weights, dropout, and each epoch's order of packs."""

    resume_from_checkpoint: PathText | None = key(None, neither=TRAINS)
    """Folder of a checkpoint, or `last` for the newest whole one of `output_dir`."""

    tuner_type: Tuner = key("full", plan=True)
    """
    Train all weights, low-rank adapters, or what another of ms-swift's tuners adds; `dummy` trains
    what the loader leaves unfrozen.
    """

    lora_rank: int = key(8, neither=TUNES, check=at_least(1))
    """Rank of adapters."""

    lora_alpha: float = key(32.0, neither=TUNES, check=at_least(1))
    """Adapters' outputs are scaled by this over their rank."""

    lora_dropout: float = key(0.05, neither=TUNES, check=from_0_below_1)
    """Dropout of adapters' inputs."""

    target_modules: tuple[str, ...] = key(("all-linear",), neither=TUNES)
    """Modules with adapters: names, `all-linear` or `all-embedding`."""

    target_regex: str | None = key(None, neither=TUNES, check=pattern_faults)
    """Pattern of names of modules with adapters, in place of `target_modules`."""

    target_parameters: tuple[str, ...] = key((), neither=TUNES)
    """Parameters with adapters of their own, such as those of experts that are not modules."""

    modules_to_save: tuple[str, ...] = key((), neither=TUNES)
    """Modules trained whole beside adapters: names, `all-embedding` or `all-norm`."""

    use_rslora: bool = key(False, neither=TUNES)
    """Scale adapters by the square root of their rank (rsLoRA)."""

    use_dora: bool = key(False, neither=TUNES)
    """Train the magnitude of each weight beside its adapter (DoRA)."""

    init_weights: str | None = key(
        None,
        neither=TUNES,
        check=must(
            lambda name: bool(re.fullmatch(r"false|gaussian|olora|pissa(_niter_\d+)?", name)),
            "false, gaussian, olora, pissa or pissa_niter_ and a number",
        ),
    )
    """
    Start of low-rank adapters: `gaussian`, `false` for random ones, or from the weights `pissa`,
    `pissa_niter_16` or `olora`; unset, a start that changes nothing.
    """

    lorap_lr_ratio: float | None = key(None, neither=TUNES, check=above_0)
    """Learning rate of an adapter's second matrix over its first's (LoRA+)."""

    freeze_llm: bool = key(False, plan=True)
    """Freeze the language model."""

    freeze_vit: bool = key(False, plan=True)
    """Freeze the vision tower."""

    freeze_aligner: bool = key(False, neither=TUNES)
    """Freeze the projector of the vision tower."""

    freeze_parameters: tuple[str, ...] = key((), neither=TUNES)
    """Prefixes of names of frozen weights, in full training."""

    freeze_parameters_regex: str | None = key(None, neither=TUNES, check=pattern_faults)
    """Pattern of names of frozen weights."""

    freeze_parameters_ratio: float = key(0.0, neither=TUNES, check=from_0_below_1)
    """Share of the weights that is frozen, beginning with the model's first."""

    trainable_parameters: tuple[str, ...] = key((), neither=TUNES)
    """Prefixes of names of trained weights, whatever is frozen."""

    trainable_parameters_regex: str | None = key(None, neither=TUNES, check=pattern_faults)
    """Pattern of names of trained weights, whatever is frozen."""

    trainer: Mapping[str, Any] = attrs.field(factory=dict, converter=_read_only, metadata=key_metadata(neither=TRAINS))
    """
    Any other key of ms-swift's `Seq2SeqTrainingArguments` and of its tuners, passed unchanged; its
    type is checked.
    """

    @property
    def shares_by_degree(self) -> bool:
        """Whether a pack is shared by as many ranks as its length needs."""
        return self.sequence_parallel_size == "auto"

    @property
    def row_ranks(self) -> int:
        """Number of ranks that share every row; together they are one rank of the plan."""
        return 1 if self.sequence_parallel_size == "auto" else self.sequence_parallel_size

    @property
    def adds_weights(self) -> bool:
        """Whether the tuner trains only weights that it adds, and none of the model's own."""
        return self.tuner_type not in {"full", "dummy"}


TUNERS: tuple[str, ...] = get_args(Tuner)
"""Values of `training.tuner_type`."""


@attrs.frozen(kw_only=True)
class RunConfig:
    """Configuration of a run, as its YAML states it."""

    model: ModelConfig
    template: TemplateConfig
    custom: CustomConfig
    training: TrainingConfig

    global_max_length: int | None = key(None, lengths="otherwise", plan=True, check=at_least(1))
    """Tokens; sets `template.max_length` and `model.max_model_len` where these are unset."""

    source: str = attrs.field(default="", eq=False, metadata=key_metadata(set_by_command=True))
    """Name of the YAML, for messages; empty for a run that none describes."""

    command: Any = key(None, set_by_command=True)
    """Command of ms-swift that trains the run, as it resolves it; None for `packplan sft`."""

    @property
    def packing_length(self) -> int:
        """
        Tokens that a pack may hold: `template.max_length` or the keys that stand in for it.

        These are `model.max_model_len`, then `global_max_length`.
        """
        length = self.template.max_length or self.global_max_length or self.model.max_model_len
        assert length is not None  # noqa: S101  # `run_faults` refuses a run without one
        return length

    @property
    def batch_size(self) -> int:
        """Packs that a rank trains in one forward pass; without packing, samples."""
        # ms-swift's batches count packs.
        return 1 if self.training.packing and self.command is None else self.training.per_device_train_batch_size

    def plan_world_size(self, num_ranks: int) -> int:
        """
        Return the number of groups of ranks that share each row.

        ArgumentError for uneven groups, or if packs cannot be shared by as many ranks as asked.
        """
        if self.training.shares_by_degree:
            largest_degree(num_ranks, self.training.max_sequence_parallel_size)
        return count_row_groups(num_ranks, self.training.row_ranks)

    @property
    def eval_packing(self) -> bool:
        """Whether evaluation is packed."""
        asked = self.training.eval_packing
        return self.training.packing and (self.custom.trainer_variant == "sft" if asked is None else asked)
