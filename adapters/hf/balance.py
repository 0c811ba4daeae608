"""
Microbatches by tokens, in TRL's trainers that learn from answers of the model.

The trainer decides which answers an optimizer step trains, and computes the loss. Here its batches
of a step are taken apart, cut by `core.shard`, and run as other microbatches:

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
from transformers import Trainer

from packplan.adapters.hf.refusals import is_old_trl, refuse_cut
from packplan.adapters.hf.rows import Counts, Row, Taken, join_rows, take_apart
from packplan.core.errors import ArgumentError, ModelError
from packplan.core.lengths import whole_number
from packplan.core.shard import Sharding, shard_dynamic, shard_packed
from packplan.core.work.model import WorkModel

_EXTREMES = {"clip_ratio/low_min": min, "clip_ratio/high_max": max}

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

    moved: int = 0
    """Rows that came from other ranks."""


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
    Let a trainer run the answers of each optimizer step as microbatches by tokens.

    The trainer's arguments still decide which answers a step trains. Loss and gradients are those
    of the trainer's own step, and logged values those of its step in one batch. Call it on every
    rank, after the trainer is built and before it trains.

    Args:
        trainer: `GRPOTrainer` or `RLOOTrainer` of TRL.
        max_tokens: Tokens of a microbatch. A longer row is a microbatch of its own.
        logprob_max_tokens: Tokens of a pass without gradients, for old and reference
            log-probabilities; None for *max_tokens*.
        padded: Whether padding counts too, rows times the longest. Use it without `unpad`.
        algorithm: A name in `core.packers.ALGORITHMS`; *padded* microbatches have their own.
        length_multiple: Each row counts as rounded up to a multiple of it.
        move_rows: Whether rows may move between ranks.

    Raises:
        ArgumentError: A setting stands against it, or the loss compares the rows of a batch.
    """
    if isinstance(trainer, _BalancedTraining):
        raise ArgumentError("host", "the trainer's microbatches are balanced already")
    refuse_cut(trainer)
    tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
    pads = [getattr(one, "pad_token_id", None) for one in (tokenizer, trainer.model.config.get_text_config())]
    trainer._balance = balance = _Balance(  # noqa: SLF001  # its own
        next((pad for pad in pads if pad is not None), 0), whole_number("max_tokens", max_tokens),
        whole_number("logprob_max_tokens", logprob_max_tokens or max_tokens),
        padded, algorithm, whole_number("length_multiple", length_multiple), move_rows, _work(trainer.model),
    )  # fmt: skip
    trainer.__class__ = type(f"Balanced{type(trainer).__name__}", (_BalancedTraining, type(trainer)), {})
    return balance.counts


def _work(model: Any) -> WorkModel | None:
    try:
        return WorkModel.from_config(model.config.to_dict())
    except ModelError:
        return None  # squares of lengths


def split_to(microbatches: list[list[int]], num: int) -> list[list[int]]:
    """
    Split microbatches until there are *num*; empty ones follow where there are too few rows.

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

    pad_token_id: int
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

    def cut(self, lengths: Sequence[int], *, shards: int = 1, max_tokens: int | None = None) -> Sharding:
        """Return the microbatches of rows of these lengths."""
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
            lengths: Lengths of each rank's rows.
            rank: This rank.
            max_tokens: Tokens of a microbatch; None for those of training.
        """
        cuts = [self.cut(own, max_tokens=max_tokens).shard(0)[0].microbatches for own in lengths]
        return split_to(cuts[rank], max(map(len, cuts)))

    def gather_lengths(self, taken: Sequence[Taken], *facts: Any) -> list[tuple[list[list[int]], Any]]:
        """
        Return of each rank the lengths of the rows of each of its batches, and further facts.

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
    """A trainer of TRL that runs microbatches by tokens."""

    _balance: _Balance
    accelerator: Any
    args: Any
    current_gradient_accumulation_steps: int
    loss_type: str
    model: Any

    def get_batch_samples(self, *args: Any) -> Any:
        """Return the batches of a step; those left waiting by a step that was cut short go."""
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
        *others, last = self._microbatches(batches)
        self.accelerator = _Alone(self.accelerator)
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

    @property
    def _divided_by(self) -> str:
        """Divisor of the loss of a batch: a constant of the step, or one of its counts."""
        loss = getattr(self, "loss_type", "")  # RLOO has one loss
        return "step" if loss in _DIVIDED_BY_STEP else "tokens" if loss == "bnpo" else "rows"

    def _microbatches(self, batches: list[Any]) -> list[tuple[dict[str, Any], float, Counts]]:
        """Return this rank's microbatches of a step: inputs, weight and numbers."""
        now, rank, by = self._balance, self.args.process_index, self._divided_by
        taken = [take_apart(batch) for batch in batches]
        divisors = [
            float(batch["num_items_in_batch"]) if by == "step" else max(getattr(Counts.from_batch(batch), by), 1)
            for batch in batches
        ]
        ranks = now.gather_lengths(taken, divisors)
        pools, lengths = [one.rows for one in taken], [own for own, _ in ranks]
        if len({divisor for _, (own,) in ranks for divisor in own}) == 1:
            pools, lengths = [list(chain(*pools))], [[list(chain(*own))] for own in lengths]
        if len(pools) == 1 and len(ranks) > 1 and now.move_rows:
            cuts = [self._exchange([own for (own,) in lengths], pools[0])]
        else:
            cuts = [
                [[rows[index] for index in indices] for indices in now.cut_alike(own, rank)]
                for rows, own in zip(pools, zip(*lengths, strict=True), strict=True)
            ]
        found = []
        for microbatches, divisor in zip(cuts, divisors, strict=False):
            for rows in microbatches:
                # One of weight 0 keeps ranks together.
                inputs = join_rows(rows or pools[0][:1], pad_token_id=now.pad_token_id)
                counts = Counts.from_batch(inputs) if rows else Counts(0, 0, 0)
                found.append((inputs, bool(rows) if by == "step" else getattr(counts, by) / divisor, counts))
                now.counts.tokens += int(counts.attended)
        now.counts.steps += 1
        now.counts.microbatches += len(found)
        return found

    def _exchange(self, lengths: list[list[int]], rows: list[Row]) -> list[list[Row]]:
        """
        Exchange rows between all ranks, and return the microbatches of this one.

        Args:
            lengths: Lengths of each rank's rows.
            rows: Rows of this rank.
        """
        rank, flat = self.args.process_index, list(chain(*lengths))
        owners = np.repeat(np.arange(len(lengths)), [len(own) for own in lengths])
        sharding = self._balance.cut(flat, shards=len(lengths))
        held = [sharding.shard(other)[0] for other in range(len(lengths))]
        first = int(np.searchsorted(owners, rank))
        leaving = [
            {int(index): rows[index - first] for index in np.unique(one.indices) if owners[index] == rank}
            for one in held
        ]
        mine = leaving[rank]
        leaving[rank] = {}
        arrived = _send_rows(leaving, self.args.device)
        self._balance.counts.moved += len(arrived)
        mine |= arrived
        own = held[rank]
        return [
            [mine[index] for index, weight in zip(own.indices[a:b].tolist(), own.weights[a:b], strict=True) if weight]
            for a, b in own.boundaries
        ]

    def _log_step(self) -> None:
        """Log means over the step's microbatches of all ranks, once for each batch."""
        now, logged = self._balance, self._logged()
        sums: dict[str, tuple[float, float]] = {}
        extremes: dict[str, list[float]] = {}
        for counts, values in now.measured:
            for name, value in values.items():
                if name in _EXTREMES and counts.rows and not is_old_trl():
                    extremes.setdefault(name, []).append(value)
                elif weight := getattr(counts, self._weighed_by(name)):
                    total, before = sums.get(name, (0.0, 0.0))
                    sums[name] = total + value * weight, before + weight
        # Older TRL takes extremes of means of batches.
        extremes |= {name: [total / weight] for name, (total, weight) in sums.items() if name in _EXTREMES}
        ranks = gather_object([(sums, extremes)])
        for name in sorted({name for found in ranks for one in found for name in one}):
            if name in _EXTREMES:
                mean = _EXTREMES[name](chain(*(found.get(name, []) for _, found in ranks)))
            else:
                totals, weights = zip(*(found.get(name, (0.0, 0.0)) for found, _ in ranks), strict=True)
                mean = sum(totals) / sum(weights)
            logged[name].extend([mean] * self.current_gradient_accumulation_steps)
        now.measured.clear()

    def _weighed_by(self, name: str) -> str:
        """Return which of the counts of a batch a logged mean is over."""
        by_token = "clip_ratio" in name and getattr(self, "importance_sampling_level", None) == "token"
        return "tokens" if by_token or name in {"entropy", "kl"} else "rows"

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
        taken = take_apart(batch)
        lengths = [own for (own,), _ in now.gather_lengths([taken])]
        cuts = now.cut_alike(lengths, self.args.process_index, now.logprob_max_tokens)
        parts = []
        for indices in cuts:
            rows = join_rows([taken.rows[index] for index in indices or [0]], pad_token_id=now.pad_token_id)
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


def _send_rows(leaving: list[dict[int, Row]], device: Any) -> dict[int, Row]:
    """
    Send rows to other ranks, and return those that arrived.

    Args:
        leaving: Rows for each rank.
        device: Device of this rank.
    """
    packed = []
    for rows in leaving:
        buffer = BytesIO()
        torch.save({index: _copy(row, "cpu") for index, row in rows.items()}, buffer)
        packed.append(torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8))
    sizes = torch.tensor([len(part) for part in packed], device=device)
    coming = torch.empty_like(sizes)
    torch.distributed.all_to_all_single(coming, sizes)
    given = torch.empty(int(coming.sum()), dtype=torch.uint8, device=device)
    torch.distributed.all_to_all_single(given, torch.cat(packed).to(device), coming.tolist(), sizes.tolist())
    arrived: dict[int, Row] = {}
    for part in torch.split(given.cpu(), coming.tolist()):
        arrived |= torch.load(BytesIO(part.numpy().tobytes()), weights_only=True)
    return {index: _copy(row, device) for index, row in arrived.items()}


def _copy(value: Any, device: Any) -> Any:
    """Return a value on a device, without the rest of the tensor that it is a part of."""
    if isinstance(value, dict):
        return {key: _copy(one, device) for key, one in value.items()}
    if isinstance(value, list):
        return [_copy(one, device) for one in value]
    return value.clone().to(device) if torch.is_tensor(value) else value
