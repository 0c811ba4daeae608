"""
Microbatches by tokens, in trainers whose batch is a number of rows.

The trainer decides which rows an optimizer step trains, and computes the loss. Here its batches of
a step are taken apart, cut by `core.shard`, and run as other microbatches:

- All ranks run equally many microbatches in a step.
- The loss of a microbatch is weighed by its share of the divisor of the trainer's own batch: rows,
  learned tokens, or a constant of the step. Batches of one divisor are cut together, on all ranks.
  Others are cut each by itself, and their rows stay on their rank.
- Logged values are means over all rows or tokens of the step, as in a step of one batch.
"""

from collections.abc import Sequence
from io import BytesIO
from itertools import chain
from typing import Any, cast

import attrs
import numpy as np
import torch
from accelerate.utils import gather_object
from scipy.optimize import linear_sum_assignment
from transformers import Trainer

from packplan.adapters.hf.refusals import checked_host, is_old_trl
from packplan.adapters.hf.rows import Counts, RowLayout, Taken, Unit
from packplan.core.errors import ArgumentError, ModelError
from packplan.core.lengths import whole_number
from packplan.core.shard import Sharding, shard_dynamic, shard_packed
from packplan.core.work.model import WorkModel

_EXTREMES = {
    "min_reward": min, "max_reward": max, "clip_ratio/low_min": min, "clip_ratio/high_max": max,
}  # fmt: skip

_DIVIDED_BY_STEP = ("dapo", "cispo", "vespo")
"""Losses of GRPO whose divisor is a constant of the step."""


@attrs.define
class BalanceCounts:
    """Counts of what `balance` has cut so far, on this rank."""

    steps: int = 0
    """Optimizer steps."""

    microbatches: int = 0
    """Microbatches with gradients."""

    tokens: int = 0
    """Tokens of the rows that this rank trained, without padding."""

    largest: int = 0
    """Tokens of the largest microbatch; with padding if `padded`."""

    moved: int = 0
    """Rows, or pairs of rows, that came from other ranks."""


def balance(
    trainer: Any,
    *,
    max_tokens: int,
    logprob_max_tokens: int | None = None,
    padded: bool = False,
    algorithm: str = "modified_first_fit_decreasing",
    length_multiple: int = 1,
    move_rows: bool = True,
) -> BalanceCounts:
    """
    Let a trainer run the rows of each optimizer step as microbatches by tokens.

    The trainer's arguments still decide which rows a step trains. Loss and gradients are those of
    the trainer's own step, and logged values those of its step in one batch. Call it on every rank,
    after the trainer is built and before it trains.

    Args:
        trainer: `GRPOTrainer`, `RLOOTrainer`, `DPOTrainer`, `KTOTrainer`, `RewardTrainer` or
            `SFTTrainer` of TRL, or `Trainer` of transformers with a causal language model.
        max_tokens: Tokens of a microbatch. A longer row, or pair of rows, is a microbatch of its
            own.
        logprob_max_tokens: Tokens of a pass without gradients, which GRPO and RLOO make for old and
            reference log-probabilities; None for *max_tokens*.
        padded: Whether padding counts too, rows times the longest. Use it without `unpad`.
        algorithm: A name in `core.packers.ALGORITHMS`; *padded* microbatches have their own.
        length_multiple: Each row counts as rounded up to a multiple of it.
        move_rows: Whether rows may move between ranks.

    Raises:
        ArgumentError: A setting stands against it, or the loss compares the rows of a batch.
    """
    if isinstance(trainer, _BalancedTraining):
        raise ArgumentError("host", "the trainer's microbatches are balanced already")
    host = checked_host(trainer)
    tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
    pads = [getattr(one, "pad_token_id", None) for one in (tokenizer, trainer.model.config.get_text_config())]
    answers = host in ("GRPOTrainer", "RLOOTrainer")
    layout = RowLayout(
        answers, host in ("DPOTrainer", "RewardTrainer"), next((pad for pad in pads if pad is not None), 0)
    )
    trainer._balance = balance = _Balance(  # noqa: SLF001  # its own
        host, layout, whole_number("max_tokens", max_tokens),
        whole_number("logprob_max_tokens", logprob_max_tokens or max_tokens),
        padded, algorithm, whole_number("length_multiple", length_multiple), move_rows, _work(trainer.model),
    )  # fmt: skip
    bases = (_BalancedAnswers if answers else _BalancedTraining, type(trainer))
    trainer.__class__ = type(f"Balanced{type(trainer).__name__}", bases, {})
    return balance.counts


def _work(model: Any) -> WorkModel | None:
    try:
        return WorkModel.from_config(model.config.to_dict())
    except ModelError:
        return None  # squares of lengths


def split_to(microbatches: list[list[int]], num: int) -> list[list[int]]:
    """
    Split microbatches until there are *num*; empty ones follow where there are too few units.

    >>> split_to([[0, 1, 2], [3]], 3), split_to([[0]], 2)
    ([[0], [1, 2], [3]], [[0], []])
    """
    while len(microbatches) < num:
        at = max(range(len(microbatches)), key=lambda number: len(microbatches[number]))
        half = len(microbatches[at]) // 2
        if not half:
            return microbatches + [[]] * (num - len(microbatches))
        microbatches = [*microbatches[:at], microbatches[at][:half], microbatches[at][half:], *microbatches[at + 1 :]]
    return microbatches


@attrs.define
class _Balance:
    """Settings of a balanced trainer, and the state of its optimizer step."""

    host: str
    layout: RowLayout
    max_tokens: int
    logprob_max_tokens: int
    padded: bool
    algorithm: str
    length_multiple: int
    move_rows: bool
    work: WorkModel | None
    counts: BalanceCounts = attrs.field(factory=BalanceCounts)
    waiting: list[Any] = attrs.field(factory=list)
    """Batches of this step that have arrived."""

    call: tuple[Any, Any] | None = None
    """Model and learned tokens of the step, inside `training_step`."""

    share: float | None = None
    """Weight of the microbatch that runs; None while none runs."""

    done: Any = 0.0
    """Losses of this step's microbatches but the last."""

    measured: list[tuple[Counts, dict[str, float]]] = attrs.field(factory=list)
    """Numbers of this step's microbatches, and the values that they logged."""

    attended: int = 0
    """Tokens of this step on all ranks."""

    trained: int = 0
    """Tokens that the trainer counted before this step."""

    def cut(self, lengths: Sequence[int], *, shards: int = 1, max_tokens: int | None = None) -> Sharding:
        """Return the microbatches of units of these lengths."""
        common: Any = {
            "shards": shards, "batch_size": len(lengths), "work": self.work, "when_long": "alone",
            "max_tokens_per_microbatch": max_tokens or self.max_tokens,
        }  # fmt: skip
        if self.padded:
            return shard_dynamic(lengths, sequence_length_round=self.length_multiple, **common)
        multiple = self.length_multiple
        return shard_packed(lengths, algorithm=self.algorithm, sequence_length_pad_multiple=multiple, **common)

    def cut_alike(self, lengths: Sequence[Sequence[int]], rank: int, max_tokens: int | None = None) -> list[list[int]]:
        """
        Return the microbatches of this rank, as many as of the rank that has most.

        Args:
            lengths: Lengths of each rank's units.
            rank: This rank.
            max_tokens: Tokens of a microbatch; None for those of training.
        """
        cuts = [self.cut(own, max_tokens=max_tokens).shard(0)[0].microbatches for own in lengths]
        return split_to(cuts[rank], max(map(len, cuts)))

    def told(self, taken: Sequence[Taken], *facts: Any) -> list[tuple[list[list[int]], Any]]:
        """
        Return what each rank has: lengths of the units of each of its batches, and further facts.

        Args:
            taken: Batches of this rank.
            *facts: Facts of this rank.
        """
        own = [one.widths if self.padded else one.tokens for one in taken]
        ranks = gather_object([(own, max(one.prompt for one in taken), facts)])
        prompt = max(longest for _, longest, _ in ranks) if self.padded else 0
        return [
            ([[max(length + prompt, 1) for length in lengths] for lengths in batches], found)
            for batches, _, found in ranks
        ]


class _Alone:
    """An accelerator that gathers this rank's values alone, since ranks are joined once a step."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)

    def gather(self, tensor: Any, **_: Any) -> Any:
        return tensor

    gather_for_metrics = reduce = gather


class _BalancedTraining:
    """A trainer of transformers or TRL that runs microbatches by tokens."""

    _balance: _Balance
    accelerator: Any
    args: Any
    current_gradient_accumulation_steps: int
    loss_type: str
    model: Any

    def get_batch_samples(self, *args: Any) -> Any:
        """Return the batches of a step; what an interrupted one left is forgotten."""
        self._balance.waiting.clear()
        return super().get_batch_samples(*args)  # type: ignore[misc]

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Train a batch: the last one of a step trains all of them, the others wait."""
        now, accelerator = self._balance, self.accelerator
        now.call, now.done = (model, num_items_in_batch), 0.0
        try:
            loss = super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc]
        finally:
            self.accelerator, now.call, now.share = accelerator, None, None
        if now.measured:
            self._log_step()
        return loss + now.done

    def _prepare_inputs(self, inputs: Any) -> Any:
        """Return the inputs of a microbatch, after all others of the step were trained."""
        now = self._balance
        if now.share is not None:
            return inputs
        prepared = super()._prepare_inputs(inputs)  # type: ignore[misc]
        if now.call is None:
            return prepared
        now.waiting.append(prepared)
        if len(now.waiting) < self.current_gradient_accumulation_steps:
            return {}
        batches, now.waiting = now.waiting, []
        model, num_items = now.call
        *others, last = self._microbatches(batches, num_items)
        now.trained, self.accelerator = getattr(self, "_total_train_tokens", 0), _Alone(self.accelerator)
        for microbatch in others:
            given = self._begin(*microbatch)
            with self.accelerator.no_sync(model):
                now.done = now.done + Trainer.training_step(self, model, given, num_items)
        return self._begin(*last)

    def _begin(self, inputs: dict[str, Any], share: float, counts: Counts) -> dict[str, Any]:
        self._balance.share = share
        self._balance.measured.append((counts, {}))
        return inputs

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        """Return the loss of a microbatch, weighed; 0 for a batch that waits."""
        now = self._balance
        if now.call is None:
            return super().compute_loss(model, inputs, *args, **options)  # type: ignore[misc]
        if now.share is None:
            return torch.zeros((), device=self.args.device, requires_grad=True)
        logged = self._logged()
        before = {name: len(values) for name, values in logged.items()}
        loss = super().compute_loss(model, inputs, *args, **options)  # type: ignore[misc]
        now.measured[-1][1].update(
            {name: values.pop() for name, values in logged.items() if len(values) > before.get(name, 0)}
        )
        # A mean over no learned token is not a number.
        return (loss if now.share else torch.nan_to_num(loss)) * now.share

    def _logged(self) -> dict[str, list[float]]:
        return cast(dict[str, list[float]], getattr(self, "_metrics", {}).get("train", {}))

    def _divided_by(self, num_items: Any) -> str:
        """Return what the loss of a batch is divided by."""
        host = self._balance.host
        if host == "GRPOTrainer":
            return "step" if self.loss_type in _DIVIDED_BY_STEP else "tokens" if self.loss_type == "bnpo" else "rows"
        if host == "DPOTrainer":
            return "chosen_tokens" if self.loss_types == ["sft"] else "rows"  # type: ignore[attr-defined]
        if host in ("SFTTrainer", "Trainer"):
            return "tokens" if num_items is None else "step"
        return "rows"

    def _microbatches(self, batches: list[Any], num_items: Any) -> list[tuple[dict[str, Any], float, Counts]]:
        """Return this rank's microbatches of a step: inputs, weight and numbers."""
        now, rank, by = self._balance, self.args.process_index, self._divided_by(num_items)
        attended = sum(now.layout.count(batch).attended for batch in batches)
        batches = [self._as_trained(batch) for batch in batches]
        taken = [now.layout.take_apart(batch) for batch in batches]
        divisors = [
            float(batch["num_items_in_batch"] if num_items is None else num_items)
            if by == "step"
            else max(getattr(now.layout.count(batch), by), 1)
            for batch in batches
        ]
        told = now.told(taken, attended, divisors)
        now.attended = int(sum(own for _, (own, _) in told))
        pools, lengths = [one.units for one in taken], [own for own, _ in told]
        if len({divisor for _, (_, own) in told for divisor in own}) == 1:
            pools, lengths = [list(chain(*pools))], [[list(chain(*own))] for own in lengths]
        if len(pools) == 1 and len(told) > 1 and now.move_rows:
            cuts = [self._exchanged([own for (own,) in lengths], pools[0])]
        else:
            cuts = [
                [[units[index] for index in indices] for indices in now.cut_alike(own, rank)]
                for units, own in zip(pools, zip(*lengths, strict=True), strict=True)
            ]
        found = []
        for microbatches, divisor in zip(cuts, divisors, strict=False):
            for units in microbatches:
                inputs = now.layout.join(units or pools[0][:1])  # one of weight 0 keeps ranks together
                counts = now.layout.count(inputs) if units else Counts(0, 0, 0)
                found.append((inputs, bool(units) if by == "step" else getattr(counts, by) / divisor, counts))
                sizes = [inputs[name].numel() for name in now.layout.masks]
                now.counts.largest = max(now.counts.largest, sum(sizes) if now.padded else int(counts.attended))
                now.counts.tokens += int(counts.attended)
        now.counts.steps += 1
        now.counts.microbatches += len(found)
        return found

    def _as_trained(self, batch: Any) -> Any:
        """Return a batch as the loss takes it: DPO of older TRL truncates rows in the loss."""
        if not hasattr(self, "_truncate_inputs"):
            return batch
        keys = ("input_ids", "attention_mask", "completion_mask")
        return batch | dict(zip(keys, self._truncate_inputs(*(batch[key] for key in keys)), strict=True))

    def _exchanged(self, lengths: list[list[int]], units: list[Unit]) -> list[list[Unit]]:
        """
        Return this rank's microbatches of the units of all ranks.

        Args:
            lengths: Lengths of each rank's units.
            units: Units of this rank.
        """
        rank, flat = self.args.process_index, list(chain(*lengths))
        owners = np.repeat(np.arange(len(lengths)), [len(own) for own in lengths])
        sharding = self._balance.cut(flat, shards=len(lengths))
        held = [sharding.shard(worker)[0] for worker in range(len(lengths))]
        kept = np.array([np.bincount(owners[own.indices], minlength=len(lengths)) for own in held])
        # Workers are given to ranks so that most rows stay.
        worker_of = linear_sum_assignment(kept.T, maximize=True)[1]
        first = int(np.searchsorted(owners, rank))
        leaving = [
            {int(index): units[index - first] for index in np.unique(held[worker].indices) if owners[index] == rank}
            for worker in worker_of
        ]
        mine = leaving[rank]
        leaving[rank] = {}
        arrived = _sent(leaving, self.args.device)
        self._balance.counts.moved += len(arrived)
        mine |= arrived
        own = held[worker_of[rank]]
        return [
            [mine[index] for index, weight in zip(own.indices[a:b].tolist(), own.weights[a:b], strict=True) if weight]
            for a, b in own.boundaries
        ]

    def _log_step(self) -> None:
        """Log means over the step's microbatches of all ranks, once for each batch."""
        now, logged = self._balance, self._logged()
        sums: dict[str, tuple[float, float]] = {}
        extremes: dict[str, list[float]] = {}
        by_batch = is_old_trl() and now.layout.answers  # older TRL takes extremes of means of batches
        for counts, values in now.measured:
            for name, value in values.items():
                if name in _EXTREMES and counts.rows and not by_batch:
                    extremes.setdefault(name, []).append(value)
                elif weight := getattr(counts, self._weighed_by(name)):
                    total, before = sums.get(name, (0.0, 0.0))
                    sums[name] = total + value * weight, before + weight
        extremes |= {name: [total / weight] for name, (total, weight) in sums.items() if name in _EXTREMES}
        told = gather_object([(sums, extremes)])
        means = {}
        for name in sorted({name for ranks in told for one in ranks for name in one}):
            if name in _EXTREMES:
                means[name] = _EXTREMES[name](chain(*(found.get(name, []) for _, found in told)))
            else:
                totals, weights = zip(*(found.get(name, (0.0, 0.0)) for found, _ in told), strict=True)
                means[name] = sum(totals) / sum(weights)
        if now.host == "KTOTrainer" and "rewards/margins" in means:
            means["rewards/margins"] = means["rewards/chosen"] - means["rewards/rejected"]
        for name, value in means.items():
            logged[name].extend([value] * self.current_gradient_accumulation_steps)
        if hasattr(self, "_total_train_tokens") and not now.layout.answers:  # those count while they generate
            self._total_train_tokens = now.trained + now.attended
            logged["num_tokens"] = [self._total_train_tokens]
        now.measured.clear()

    def _weighed_by(self, name: str) -> str:
        """Return which of the counts of a batch a logged mean is over."""
        host, end = self._balance.host, name.rpartition("/")[2]
        if name == "entropy":
            return "attended" if host == "SFTTrainer" and is_old_trl() else "tokens"
        if name == "mean_token_accuracy":
            return "chosen_tokens" if host == "DPOTrainer" else "tokens"
        if name.startswith("logits/"):
            return f"{end}_tokens"
        if host == "KTOTrainer" and end in ("chosen", "rejected"):
            return end
        by_token = host == "GRPOTrainer" and ("clip_ratio" in name and self.importance_sampling_level == "token")  # type: ignore[attr-defined]
        return "tokens" if by_token or name == "kl" else "rows"


class _BalancedAnswers(_BalancedTraining):
    """A trainer that generates answers, and asks for their log-probabilities."""

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Any, attention_mask: Any, logits_to_keep: int, batch_size: Any = None, **given: Any
    ) -> Any:  # fmt: skip
        """Return log-probabilities; those without gradients in microbatches by tokens."""
        ask = super()._get_per_token_logps_and_entropies  # type: ignore[misc]
        if batch_size is None:
            return ask(model, input_ids, attention_mask, logits_to_keep, **given)
        now, answer = self._balance, slice(-logits_to_keep, None)
        flags = {name: value for name, value in given.items() if isinstance(value, bool)}
        batch = {name: value for name, value in given.items() if name not in flags}
        batch |= {
            "prompt_ids": input_ids[:, :-logits_to_keep], "completion_ids": input_ids[:, answer],
            "prompt_mask": attention_mask[:, :-logits_to_keep], "completion_mask": attention_mask[:, answer],
        }  # fmt: skip
        taken = now.layout.take_apart(batch)
        lengths = [own for (own,), _ in now.told([taken])]
        cuts = now.cut_alike(lengths, self.args.process_index, now.logprob_max_tokens)
        parts = []
        for indices in cuts:
            rows = now.layout.join([taken.units[index] for index in indices or [0]])
            masks = [rows.pop("prompt_mask"), rows.pop("completion_mask")]
            ids = [rows.pop("prompt_ids"), rows.pop("completion_ids")]
            found = ask(
                model, torch.cat(ids, 1), torch.cat(masks, 1), ids[1].shape[1], batch_size=len(ids[1]), **rows, **flags
            )
            parts.append([one if one is None else padded_to(one, logits_to_keep)[: len(indices)] for one in found])
        order = torch.tensor(list(chain(*cuts))).argsort().to(input_ids.device)
        return tuple(one[0] if one[0] is None else torch.cat(one)[order] for one in zip(*parts, strict=True))


def padded_to(rows: torch.Tensor, width: int) -> torch.Tensor:
    """Return rows with zeros after their end."""
    return torch.nn.functional.pad(rows, (0, width - rows.shape[1]))


def _sent(leaving: list[dict[int, Unit]], device: Any) -> dict[int, Unit]:
    """
    Send units to other ranks, and return those that arrived.

    Args:
        leaving: Units for each rank.
        device: Device of this rank.
    """
    packed = []
    for units in leaving:
        buffer = BytesIO()
        torch.save(
            {index: {key: _copied(value, "cpu") for key, value in unit.items()} for index, unit in units.items()},
            buffer,
        )
        packed.append(torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8))
    sizes = torch.tensor([len(part) for part in packed], device=device)
    coming = torch.empty_like(sizes)
    torch.distributed.all_to_all_single(coming, sizes)
    given = torch.empty(int(coming.sum()), dtype=torch.uint8, device=device)
    torch.distributed.all_to_all_single(given, torch.cat(packed).to(device), coming.tolist(), sizes.tolist())
    arrived: dict[int, Unit] = {}
    for part in torch.split(given.cpu(), coming.tolist()):
        arrived |= torch.load(BytesIO(part.numpy().tobytes()), weights_only=True)
    return {index: {key: _copied(value, device) for key, value in unit.items()} for index, unit in arrived.items()}


def _copied(value: Any, device: Any) -> Any:
    """Return a value on a device, without the rest of the tensor that it is a part of."""
    if isinstance(value, list):
        return [_copied(one, device) for one in value]
    return value.clone().to(device) if torch.is_tensor(value) else value
