"""
Compare forecasts of peak memory with the allocator's peak. On a CPU, torch's profiler records this
peak; on a GPU, CUDA's allocator does.

On one rank, Packplan's trainer trains all packs of a plan for two epochs. On two ranks, each pack
is trained once after a first step, under DDP, or under FSDP 2 as accelerate wraps the model. The
forecast is that of `packplan plan fit` for the heaviest pack.
"""

import argparse
import statistics
from bisect import bisect, insort
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

import attrs

from benchmarks.child import Child, run_in_child
from benchmarks.options import add_names, add_number
from benchmarks.table import show
from packplan.adapters.progress import progress
from packplan.core.config.run import CustomConfig, ModelConfig, RunConfig, TemplateConfig, TrainingConfig
from packplan.core.forecast import bytes_text

LIMIT_S = 1800.0

_EPOCHS = 2


@attrs.frozen
class Setting:
    """Model, tuner and ranks of a training run."""

    family: str
    tuner: str = "full"
    checkpointing: bool = False
    ranks: int = 1
    bf16: bool = False
    copies: bool = False
    """Whether each rank holds the whole model (DDP), not only a part of it (FSDP 2)."""

    microbatches: int = 1
    """Number of packs that a rank trains in an optimizer step."""

    @property
    def name(self) -> str:
        """Name of the setting, as a value of --settings."""
        told = {
            "checkpointing": self.checkpointing,
            "bf16": self.bf16,
            "ddp": self.copies,
            "accumulation": self.microbatches > 1,
        }
        return "-".join([self.family, self.tuner, *(name for name, holds in told.items() if holds), f"{self.ranks}"])

    @property
    def is_sharded(self) -> bool:
        """Whether the weights of the model are sharded over ranks (FSDP 2)."""
        return self.ranks > 1 and not self.copies


SETTINGS = MappingProxyType(
    {
        one.name: one
        for one in (
            Setting("text"),
            Setting("text", checkpointing=True),
            Setting("text", "lora"),
            Setting("text", "lora", checkpointing=True, bf16=True),
            Setting("images"),
            Setting("images", checkpointing=True),
            Setting("images", "lora"),
            Setting("images", "lora", checkpointing=True),
            Setting("text", checkpointing=True, ranks=2),
            Setting("images", "lora", ranks=2),
            Setting("text", microbatches=2),
            Setting("text", checkpointing=True, ranks=2, microbatches=2),
            Setting("text", checkpointing=True, ranks=2, copies=True),
            Setting("images", "lora", ranks=2, copies=True),
        )
    }
)
"""Name -> setting."""


@attrs.frozen
class MemoryRow:
    """Forecast and measured peak of a setting, in bytes."""

    name: str
    forecast: int
    measured: int

    @property
    def error(self) -> float:
        """Deviation of the forecast, relative to the measured peak."""
        return self.forecast / self.measured - 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_names(parser, "--settings", SETTINGS, list(SETTINGS))
    add_number(parser, "--width", 256, "hidden size of the models, a multiple of 128")
    add_number(parser, "--layers", 4, "layers of the models")
    add_number(parser, "--max-length", 1024, "packing length in tokens")
    add_number(parser, "--samples", 48, "samples of the data")
    add_number(parser, "--seed", 1, "seed of the data")
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cpu", help="cuda trains the settings of one rank (default: cpu)"
    )


def run(options: argparse.Namespace) -> None:
    """Forecast and measure the memory of each setting, then print the table."""
    rows = []
    settings = [one for one in options.settings if options.device == "cpu" or SETTINGS[one].ranks == 1]
    with TemporaryDirectory() as name, progress(total=len(settings), desc="training") as bar:
        folder = Path(name)
        run_in_child(partial(_write, folder, options), limit_s=LIMIT_S)
        for chosen in settings:
            config = _config(SETTINGS[chosen], folder, options)
            rows.append(_row(SETTINGS[chosen], config))
            bar.update()
    errors = [abs(row.error) for row in rows]
    notes = [f"median error {statistics.median(errors):.1%}, worst {max(errors):.1%}"]
    columns = {
        "setting": lambda row: row.name,
        "forecast": lambda row: bytes_text(row.forecast),
        "measured": lambda row: bytes_text(row.measured),
        "error": lambda row: f"{row.error:+.1%}",
    }
    show(rows, columns, left={"setting"}, as_json=options.json, notes=notes, packages=("torch", "transformers"))


def _write(folder: Path, options: argparse.Namespace) -> None:
    from benchmarks.records import write_sized_model, write_sized_text_model, write_training_data

    write_sized_model(folder / "images", options.width, options.layers)
    write_sized_text_model(folder / "text", options.width, options.layers)
    for kind in ("text", "images"):
        write_training_data(folder, kind, options.samples, seed=options.seed)


def _config(setting: Setting, folder: Path, options: argparse.Namespace) -> RunConfig:
    return RunConfig(
        model=ModelConfig(model=str(folder / setting.family)),
        template=TemplateConfig(max_length=options.max_length),
        custom=CustomConfig(train_jsonl=(str(folder / f"{setting.family}.jsonl"),)),
        training=TrainingConfig(
            output_dir=str(folder / setting.name),
            packing_drop_last=False,
            effective_batch_size=setting.ranks * setting.microbatches,
            num_train_epochs=_EPOCHS,
            tuner_type=setting.tuner,  # type: ignore[arg-type]  # of the table
            trainer={
                "use_cpu": options.device == "cpu",
                "bf16": setting.bf16,
                "gradient_checkpointing": setting.checkpointing,
                "save_strategy": "no",
                "report_to": [],
                "dataloader_num_workers": 0,
                "disable_tqdm": True,
            },
        ),
    )


def _row(setting: Setting, config: RunConfig) -> MemoryRow:
    forecast = run_in_child(partial(_forecast, config, setting), limit_s=LIMIT_S)
    if setting.ranks == 1:
        measured = run_in_child(partial(_measured, config), limit_s=LIMIT_S)
    else:
        with ExitStack() as stack:
            file = Path(config.training.output_dir) / "meeting"
            ranks = [
                stack.enter_context(Child(partial(_measured_rank, config, rank, setting, file)))
                for rank in range(setting.ranks)
            ]
            with ThreadPoolExecutor(setting.ranks) as threads:
                found = list(threads.map(lambda one: one.next(LIMIT_S), ranks))
        measured = max(found)
    return MemoryRow(setting.name, forecast, measured)


def _forecast(config: RunConfig, setting: Setting) -> int:
    from packplan.app.plan.fit import forecast_memory

    if setting.is_sharded:
        # A CPU's trainer would not take it.
        settings = {**config.training.trainer, "fsdp": "full_shard"}
        config = attrs.evolve(config, training=attrs.evolve(config.training, trainer=settings))
    found = forecast_memory(config, memory=None, ranks=setting.ranks)
    return found.packs[0].peak.total


def _measured(config: RunConfig) -> int:
    """Return the peak memory of training on one rank, in bytes."""
    from packplan.adapters.ranks.torch_group import OneRank
    from packplan.app.sft.train import prepare

    trainer, _ = prepare(config, OneRank())
    if not config.training.trainer["use_cpu"]:
        import torch

        trainer.train()
        return torch.cuda.max_memory_allocated()
    return allocator_peak((*trainer.model.parameters(), *trainer.model.buffers()), trainer.train)


def _measured_rank(config: RunConfig, rank: int, setting: Setting, file: Path) -> Iterator[int]:
    """Yield the peak bytes of one rank. Steps run here, since the trainer refuses FSDP on CPUs."""
    import torch
    import torch.distributed as dist

    from packplan.adapters.forecast.memory import shard_as_accelerate
    from packplan.adapters.ranks.torch_group import OneRank
    from packplan.app.sft.train import prepare

    trainer, _ = prepare(config, OneRank())
    trainer._prepare_gradient_checkpointing(trainer.template.get_base_model(trainer.model))  # noqa: SLF001
    trainer.model.train()
    trainer.model_wrapped = trainer.accelerator.prepare_model(trainer.model)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=setting.ranks)
    if not setting.copies:
        shard_as_accelerate(trainer.model, setting.ranks, mixed=trainer.accelerator.mixed_precision)
    optimizer = torch.optim.AdamW([one for one in trainer.model.parameters() if one.requires_grad], fused=True)

    def train(pack: int) -> None:
        for left in reversed(range(setting.microbatches)):
            if not setting.copies:
                trainer.model.set_requires_gradient_sync(not left)
            batch = trainer.data_collator([trainer.train_dataset[pack]])
            with trainer.media_hook():
                inputs = trainer._prepare_inputs(dict(batch))  # noqa: SLF001
                count = torch.tensor(batch["loss_normaliser"])
                trainer.compute_loss(trainer.model_wrapped, inputs, num_items_in_batch=count).backward()
            del batch, inputs, count
        optimizer.step()
        optimizer.zero_grad()

    def train_copy() -> None:
        # Buckets are tensors of nobody, so they are seen only while they are made.
        trainer.model_wrapped = torch.nn.parallel.DistributedDataParallel(trainer.model)
        for pack in (0, *range(len(trainer.train_dataset))):
            train(pack)

    held = (*trainer.model.parameters(), *trainer.model.buffers())
    if setting.copies:
        yield allocator_peak(held, train_copy)
        return
    train(0)
    # One step at a time: the profiler does not see what gloo's threads free, which would add up.
    states = [one for state in optimizer.state.values() for one in state.values()]
    held = (*held, *states)
    yield max(allocator_peak(held, partial(train, pack)) for pack in range(len(trainer.train_dataset)))


def allocator_peak(held: Iterable[Any], train: Callable[[], Any]) -> int:
    """
    Return the peak bytes of the CPU's allocator during a call, including earlier tensors.

    Args:
        held: Tensors that exist before the call.
        train: Function to call.
    """
    import gc

    from torch._C._profiler import _EventType
    from torch.distributed.tensor import DTensor
    from torch.profiler import ProfilerActivity, profile

    gc.collect()
    storages = [(one.to_local() if isinstance(one, DTensor) else one).untyped_storage() for one in held]
    before: int = sum({one.data_ptr(): one.nbytes() for one in storages}.values())
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        train()
    found: list[Any] = []
    waiting = list(profiler.profiler.kineto_results.experimental_event_tree())
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.typed[0] == _EventType.Allocation:
            found.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
    return before + _peak_of_blocks(sorted(found, key=lambda one: one[0]))


def _peak_of_blocks(events: Iterable[tuple[int, int, int]]) -> int:
    """
    Return the peak of allocated bytes. If a new block overlaps an older block, another thread has
    freed the older block.

    Args:
        events: Time, address and bytes, by time; bytes are negative if a block is freed.
    """
    starts: list[int] = []
    sizes: dict[int, int] = {}
    total = peak = 0
    for _, address, size in events:
        if size < 0:
            if address not in sizes:  # was there before
                total += size
            else:
                total -= sizes.pop(address)
                starts.remove(address)
            continue
        place = bisect(starts, address)
        while place and starts[place - 1] + sizes[starts[place - 1]] > address:
            total -= sizes.pop(starts.pop(place := place - 1))
        while place < len(starts) and starts[place] < address + size:
            total -= sizes.pop(starts.pop(place))
        insort(starts, address)
        sizes[address] = size
        total += size
        peak = max(peak, total)
    return peak
