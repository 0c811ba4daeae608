"""Gives trainers what they would not train as planned, and writes what each was told."""

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import packplan as pp
from packplan.hf import use_plan
from tests.hosts import law
from tests.hosts.law import PACKING_LENGTH, cell_of, model_of, rows_of, trainer_of

# isort: split
import torch
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

ROWS = rows_of("qwen2")

PLAN = pp.plan([len(row["input_ids"]) for row in ROWS], PACKING_LENGTH)


class Streamed(IterableDataset):
    """Rows one after the other, without a number."""

    def __iter__(self):
        return iter(ROWS)


def given(out: Path, rows: Any = ROWS, host: str = "transformers", **settings: Any) -> Any:
    """Return a trainer with these rows and settings."""
    return trainer_of(cell_of(host, "qwen2"), model_of("qwen2", "packplan"), rows, out, **settings)


def planned(
    out: Path, rows: Any = ROWS, plan: Any = PLAN, eval_plan: Any = None, row_ranks: int = 1, **settings: Any
) -> Any:
    """Return a trainer that follows a plan."""
    trainer = given(out, rows, **settings)
    use_plan(trainer, plan, eval_plan=eval_plan, sequence_parallel_size=row_ranks)
    return trainer


def rows_with(change: Any) -> list[dict[str, Any]]:
    """Return the rows with other keys."""
    return [row | change(number, row) for number, row in enumerate(ROWS)]


def longer(number: int, row: dict[str, Any]) -> dict[str, Any]:
    """Return one more token of row 3."""
    return {name: [*row[name], 25] for name in row} if number == 3 else {}


def served_by(out: Path, make_loader: Any) -> None:
    """Train by a loader that somebody put in the place of the plan's."""
    trainer = planned(out, num_train_epochs=1)
    loader = trainer.get_train_dataloader()
    other = DataLoader(loader.dataset, **make_loader(loader), collate_fn=loader.collate_fn)
    trainer.get_train_dataloader = lambda: other
    trainer.train()


def without_plan(out: Path) -> None:
    """Resume a plan from a checkpoint that was trained without one."""
    trainer = given(out, max_steps=1, save_strategy="steps", save_steps=1)
    trainer.data_collator = lambda _: dict.fromkeys(("input_ids", "labels"), torch.tensor([[20, 21]]))
    trainer.train()
    planned(out).train(resume_from_checkpoint=True)


def resumed(out: Path, rows: Any = ROWS, plan: Any = PLAN, change: Any = None, **settings: Any) -> None:
    """Train a step, change something, and resume with other rows, another plan or settings."""
    planned(out, max_steps=1, save_strategy="steps", save_steps=1).train()
    if change:
        change(out / "checkpoint-1" / "trainer_state.json")
    planned(out, rows, plan, **settings).train(resume_from_checkpoint=True)


def damage(path: Path) -> None:
    """Change one digit of a trainer's state."""
    path.write_text(path.read_text().replace('"global_step": 1', '"global_step": 2'))


def exchanged() -> list[dict[str, Any]]:
    """Return the rows, two of one length in each other's place."""
    lengths, rows = PLAN.lengths.tolist(), list(ROWS)
    second = next(i for i, length in enumerate(lengths) if length in lengths[:i])
    first = lengths.index(lengths[second])
    rows[first], rows[second] = rows[second], rows[first]
    return rows


def prompts_masked(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Collate padded rows that learn their last token alone."""
    width = 8 * -(-max(len(row["input_ids"]) for row in rows) // 8)
    ids = torch.tensor([row["input_ids"] + [0] * (width - len(row["input_ids"])) for row in rows])
    mask = torch.tensor([[place < len(row["input_ids"]) for place in range(width)] for row in rows]).long()
    last = mask.cumsum(1) == mask.sum(1, keepdim=True)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(~last | (mask == 0), -100)}


def collated(out: Path) -> str:
    """Train by a collator that learns the last token of each row, where rows learn more."""
    trainer = given(out)
    trainer.data_collator = prompts_masked
    use_plan(trainer, PLAN)
    return f"{learned_of(trainer)} tokens are learned of {len(ROWS)} rows, {PLAN.lengths.min()} the shortest"


def learned_of(trainer: Any) -> int:
    """Return the supervised tokens of an epoch of a trainer."""
    return sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in trainer.get_train_dataloader())


def as_trl_learns(out: Path) -> str:
    """Train rows with a mask of completions, which TRL is told not to use, padded to multiples."""
    rows = rows_with(lambda _, row: {"labels": row["input_ids"], "completion_mask": [0] * len(row["input_ids"])})
    trainer = given(out, rows, "trl", completion_only_loss=False, pad_to_multiple_of=8)
    alone = learned_of(trainer)
    use_plan(trainer, PLAN)
    return f"{learned_of(trainer) - alone} tokens are learned that TRL does not learn"


def evaluated(out: Path) -> str:
    """Evaluate samples without anything to learn."""
    untaught = rows_with(lambda _, row: {"labels": [-100] * len(row["input_ids"])})
    trainer = planned(out, eval_dataset=untaught, eval_plan=PLAN)
    return f"evaluated: {sorted(set(trainer.evaluate()) & {'eval_loss', 'eval_runtime'})}"


def leaking(out: Path) -> None:
    """Train a model of a family whose attention ignores where samples begin."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model("bloom", vocab_size=300, hidden_size=32, n_layer=2, n_head=4)
    model = AutoModelForCausalLM.from_config(config)
    use_plan(trainer_of(cell_of("transformers", "bloom"), model, ROWS, out), PLAN)


def launched(out: Path) -> None:
    """Train in one of two processes, neither of which knows of the other."""
    trainer = given(out)
    os.environ["WORLD_SIZE"] = "2"
    try:
        use_plan(trainer, PLAN)
    finally:
        del os.environ["WORLD_SIZE"]


CASES = {
    "a plan needs rows by index, and a Streamed only yields them": partial(planned, rows=Streamed(), max_steps=1),
    "include_for_metrics is set": partial(planned, include_for_metrics=["inputs"]),
    "train_sampling_strategy is 'group_by_length'": partial(planned, train_sampling_strategy="group_by_length"),
    "2 processes were started": launched,
    "follows a plan already": lambda out: use_plan(planned(out), PLAN),
    "the plan has 27 samples, but the data set 1 rows": partial(planned, eval_dataset={"a": ROWS}, eval_plan=PLAN),
    "sample 3 (row 3) is not the one that was planned": lambda out: planned(out, rows_with(longer)).train(),
    "the loader's batch is pack 0, but the schedule's is": lambda out: served_by(
        out, lambda loader: {"sampler": SequentialSampler(loader.dataset)}
    ),
    "the loader's batch is pack None, but the schedule's is": lambda out: served_by(
        out, lambda loader: {"batch_sampler": loader.batch_sampler.schedule.batches(0, rank=0)[:-2]}
    ),
    "has no progress of a plan": without_plan,
    "plan: stored": partial(resumed, plan=pp.plan(PLAN.lengths, 2 * PACKING_LENGTH)),
    "trainer_state.json is damaged": partial(resumed, change=damage),
    "optim: stored '\"sgd\"', now '\"adamw_torch\"'": partial(resumed, optim="adamw_torch"),
    "in another way, so this run cannot go on with it:\n  data": partial(resumed, rows=exchanged()),
    "26 tokens are learned of 27 rows, 1 the shortest": collated,
    "0 tokens are learned that TRL does not learn": as_trl_learns,
    "evaluated: ['eval_runtime']": evaluated,
    "bloom may not pack": leaking,
    "packing is set": partial(planned, host="trl", packing=True),
    "the evaluation has no plan, so ranks": partial(planned, row_ranks=2),
}
"""Words of what is told -> what is done."""


def main(out: str) -> None:
    """Do all, and write down what was told."""
    told = {}
    for number, (words, case) in enumerate(CASES.items()):
        try:
            told[words] = str(case(Path(out) / str(number)))
        except (pp.core.errors.PackplanError, ValueError, RuntimeError) as error:
            told[words] = f"{type(error).__name__}: {error}"
    (Path(out) / "told.json").write_text(json.dumps(told))


def after_law(cells: str, out: str) -> None:
    """Train the cells of a file, then do all: importing what they need takes longer than most."""
    law.main(cells)
    main(out)
