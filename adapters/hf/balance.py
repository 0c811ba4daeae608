"""
`balance` computes the steps of TRL's GRPO and RLOO trainers in microbatches under a token limit.

The trainer decides which answers an optimizer step trains, and computes the loss. `balance` divides
the rows of the step's batches into new microbatches, with `core.shard`, by these rules:

- All ranks run equally many microbatches in a step.
- The trainer divides the loss of a batch by the batch's number of rows or supervised tokens, or by
  a constant of the step. The loss of a microbatch is weighted by the microbatch's share of this
  divisor. If all batches of a step have the same divisor, a microbatch may have rows of several
  batches and ranks. Without *move_rows*, its rows are from one rank. If the divisors differ, a
  microbatch has rows of one batch and one rank.
- Logged values are the same as if the step had one batch: means, minima or maxima over all rows or
  tokens of the step.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from io import BytesIO
from itertools import chain
from typing import Any, cast

import attrs
import numpy as np
import torch
from accelerate.utils import gather_object, recursively_apply, send_to_device
from torch.nn.functional import pad
from transformers import Trainer

from packplan.adapters.hf.batches import BatchCounts, BatchRows, Row, join_rows, split_batch
from packplan.adapters.hf.first_pack import LocalAccelerator
from packplan.adapters.hf.following import insert_base_class
from packplan.adapters.hf.packed_calls import HOOKED
from packplan.adapters.hf.pairs import Logged, weighted_means
from packplan.adapters.hf.refusals import is_old_trl, refuse_balance_conflicts
from packplan.core.errors import ArgumentError, ModelError, counted, verb_for
from packplan.core.lengths import as_whole_number
from packplan.core.metrics import PackingMetrics, packing_metrics
from packplan.core.shard import Sharding, shard_dynamic, shard_packed
from packplan.core.work.model import WorkModel

log = logging.getLogger(__name__)

_EXTREMES = {"clip_ratio/low_min": min, "clip_ratio/high_max": max}
"""Name of a logged value that is a minimum or maximum, not a mean -> function that computes it."""

_DIVIDED_BY_STEP = ("dapo", "cispo", "vespo")
"""Values of GRPO's `loss_type` that divide a batch's loss by a constant of the step."""


@attrs.define
class BalanceCounts:
    """Numbers of steps, microbatches, tokens and moved rows on this rank."""

    steps: int = 0
    """Optimizer steps."""

    microbatches: int = 0
    """Microbatches that this rank trained, empty ones included."""

    tokens: int = 0
    """Tokens of the rows that this rank trained, without padding."""

    moved: int = 0
    """Rows that this rank received from other ranks and trained."""

    metrics: PackingMetrics | None = None
    """Packing metrics of this rank's microbatches that have rows; None before the first step."""

    def add_microbatches(self, loads: Sequence[int], max_tokens: int) -> None:
        """Add the microbatches of one step to the metrics; *loads* has the tokens of each."""
        if loads:
            bound = -(-sum(min(load, max_tokens) for load in loads) // max_tokens)
            packs = [[index] for index in range(len(loads))]
            found = packing_metrics(loads, packs, capacity=max_tokens, bound=bound)
            self.metrics = found if self.metrics is None else self.metrics + found


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
    Make a trainer compute the answers of each optimizer step in microbatches under a token limit.

    ```py
    trainer = GRPOTrainer(model, reward, args, train_dataset=prompts)
    unpad(trainer.model)
    balance(trainer, max_tokens=8192)
    trainer.train()
    ```

    The result counts the steps, microbatches, tokens and moved rows of the training. The trainer's
    arguments still decide which answers a step trains. Apart from rounding, loss and gradients stay
    the same as in the trainer's own step. Logged values are the same as in a step of one batch.
    Call `balance` on every rank, after the trainer is built and before it trains.

    Args:
        trainer: `GRPOTrainer` or `RLOOTrainer` of TRL.
        max_tokens: Maximum number of tokens of a microbatch. A row with more tokens becomes a
            microbatch by itself.
        logprob_max_tokens: Maximum number of tokens of a forward pass without gradients, which
            computes old or reference log-probabilities; None uses *max_tokens*.
        padded: Whether padding counts. The tokens of a microbatch are then its number of rows times
            the length of its longest row. Set *padded* for models without `unpad`.
        algorithm: Packing algorithm, a name in `core.packers.ALGORITHMS`; not used if *padded*.
        length_multiple: The length of each row is rounded up to a multiple of this number.
        move_rows: Whether rows may move between ranks.

    Raises:
        ArgumentError: The trainer or a setting is not supported, the loss compares the rows of a
            batch, or `balance` was called before for this trainer.
    """
    if isinstance(trainer, _BalancedTraining):
        raise ArgumentError("host", "balance was called for this trainer already: call it once")
    refuse_balance_conflicts(trainer)
    tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
    pads = [getattr(one, "pad_token_id", None) for one in (tokenizer, trainer.model.config.get_text_config())]
    trainer._balance = balance = _BalanceState(  # noqa: SLF001  # its own
        next((pad for pad in pads if pad is not None), 0), as_whole_number("max_tokens", max_tokens),
        as_whole_number("logprob_max_tokens", logprob_max_tokens or max_tokens), padded, algorithm,
        as_whole_number("length_multiple", length_multiple), move_rows, _find_work_model(trainer.model),
    )  # fmt: skip
    insert_base_class(trainer, _BalancedTraining)
    return balance.counts


def _find_work_model(model: Any) -> WorkModel | None:
    """
    Return the work model of a model, or None for an unknown family. Without a work model, the work
    of a row is its squared length.
    """
    try:
        return WorkModel.from_config(model.config.to_dict())
    except ModelError:
        return None


def split_microbatches(microbatches: list[list[int]], num: int) -> list[list[int]]:
    """
    Halve the microbatch with the most rows until there are *num* microbatches.

    If no microbatch has two rows, empty microbatches are added.

    >>> split_microbatches([[0, 1, 2], [3]], 3), split_microbatches([[0]], 2)
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
class _BalanceState:
    """Settings of `balance`, and the state of the trainer's current optimizer step."""

    pad_token_id: int
    max_tokens: int
    logprob_max_tokens: int
    padded: bool
    algorithm: str
    length_multiple: int
    move_rows: bool
    work: WorkModel | None
    counts: BalanceCounts = attrs.field(factory=BalanceCounts)
    pending_batches: list[Any] = attrs.field(factory=list)
    """Prepared batches of this step that are not trained yet."""

    call: tuple[Any, Any] | None = None
    """Model and `num_items_in_batch` of the running `training_step`; None outside of it."""

    has_warned: bool = False
    """Whether a microbatch has exceeded the token limit with its padding before."""

    weight: float | None = None
    """
    Weight of the current microbatch in the loss of the step; None while batches are only collected.
    """

    loss: Any = 0.0
    """Sum of the losses of this step's microbatches, except the last one."""

    logged: list[tuple[BatchCounts, dict[str, float]]] = attrs.field(factory=list)
    """Counts of each microbatch of this step, and its logged values by name."""

    def shard_rows(self, lengths: Sequence[int], *, shards: int = 1, max_tokens: int | None = None) -> Sharding:
        """Divide rows of *lengths* tokens over shards, and each shard into microbatches."""
        common: Any = {
            "shards": shards, "batch_size": len(lengths), "work": self.work, "when_long": "alone",
            "max_tokens_per_microbatch": max_tokens or self.max_tokens,
        }  # fmt: skip
        if self.padded:
            return shard_dynamic(lengths, sequence_length_round=self.length_multiple, **common)
        multiple = self.length_multiple
        return shard_packed(lengths, algorithm=self.algorithm, sequence_length_pad_multiple=multiple, **common)

    def microbatches(self, lengths: Sequence[Sequence[int]], rank: int, limit: int | None = None) -> list[list[int]]:
        """
        Divide the rows of *rank* into microbatches of row indices, equally many on every rank.

        Args:
            lengths: Lengths of each rank's rows.
            rank: Rank whose rows are divided; they stay on this rank.
            limit: Maximum number of tokens of a microbatch; None uses `max_tokens`.
        """
        cuts = [self.shard_rows(own, max_tokens=limit).shard(0)[0].microbatches for own in lengths]
        return split_microbatches(cuts[rank], max(map(len, cuts)))

    def gather_lengths(self, batches: Sequence[BatchRows], *facts: Any) -> list[tuple[list[list[int]], Any]]:
        """
        Return, for each rank, the row lengths of each of its batches, and its *facts*. If padding
        counts, a length includes the widest prompt of all ranks.

        Args:
            batches: Batches of this rank.
            *facts: Further values of this rank, which are returned unchanged.
        """
        own = [one.answer_widths if self.padded else one.tokens for one in batches]
        ranks = gather_object([(own, max(one.prompt_width for one in batches), facts)])
        prompt = max(longest for _, longest, _ in ranks) if self.padded else 0
        return [
            ([[max(length + prompt, 1) for length in lengths] for lengths in batches], found)
            for batches, _, found in ranks
        ]


class _NoBackward(LocalAccelerator):
    """
    Accelerator whose `backward` does nothing, for a batch that is collected but not yet computed.
    """

    def backward(self, *_: Any, **__: Any) -> None:
        """Do nothing, since DeepSpeed refuses a loss that no model has computed."""


@contextmanager
def _accumulating(accelerator: Any, model: Any) -> Iterator[None]:
    """
    Accumulate gradients inside this context, without updates of the weights. Except under
    DeepSpeed, ranks do not exchange gradients.
    """
    state = accelerator.gradient_state
    state._set_sync_gradients(False)  # noqa: FBT003, SLF001  # as transformers' loop does
    with nullcontext() if accelerator.distributed_type == "DEEPSPEED" else accelerator.no_sync(model):
        yield
    state._set_sync_gradients(True)  # noqa: FBT003, SLF001


class _BalancedTraining:
    """Mixin that makes a trainer of TRL divide an optimizer step into microbatches by tokens."""

    _balance: _BalanceState
    accelerator: Any
    args: Any
    model: Any
    current_gradient_accumulation_steps: int

    def get_batch_samples(self, *args: Any) -> Any:
        """Return the batches of a step, and discard batches left from an unfinished step."""
        self._balance.pending_batches.clear()
        return super().get_batch_samples(*args)  # type: ignore[misc]

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """
        Collect a batch and return loss 0. At the last batch of a step, train all collected batches
        and return their loss.
        """
        step, accelerator = self._balance, self.accelerator
        step.call, step.loss = (model, num_items_in_batch), 0.0
        try:
            loss = super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc]
        finally:
            self.accelerator, step.call, step.weight = accelerator, None, None
        if step.logged:
            self._log_step()
        return loss + step.loss

    def _prepare_inputs(self, inputs: Any) -> Any:
        """
        Collect a batch, and return no inputs. At the last batch of a step, train all microbatches
        but the last one, and return the inputs of the last one. Outside of `training_step`, prepare
        inputs as the trainer does.
        """
        step = self._balance
        if step.weight is not None:
            return inputs
        prepared = super()._prepare_inputs(inputs)  # type: ignore[misc]
        if step.call is None:
            return prepared
        step.pending_batches.append(prepared)
        if len(step.pending_batches) < self.current_gradient_accumulation_steps:
            return {}
        batches, step.pending_batches = step.pending_batches, []
        model, num_items = step.call
        *others, last = self._make_microbatches(batches)
        self.accelerator = LocalAccelerator(self.accelerator)  # ranks are joined once a step
        for microbatch in others:
            given = self._start_microbatch(*microbatch)
            with _accumulating(self.accelerator, model):
                step.loss = step.loss + Trainer.training_step(self, model, given, num_items)
        return self._start_microbatch(*last)

    def _start_microbatch(self, inputs: dict[str, Any], weight: float, counts: BatchCounts) -> dict[str, Any]:
        """Store the weight and counts of the microbatch to compute next; return its inputs."""
        self._balance.weight = weight
        self._balance.logged.append((counts, {}))
        return inputs

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        """
        Return the loss of a microbatch times its weight, or 0 for a batch that is only collected.
        """
        step = self._balance
        if step.call is None:
            return super().compute_loss(model, inputs, *args, **options)  # type: ignore[misc]
        if step.weight is None:
            self.accelerator = _NoBackward(self.accelerator)
            return torch.zeros((), device=self.args.device)
        logged = self._collected_values()
        before = {name: len(values) for name, values in logged.items()}
        loss = super().compute_loss(model, inputs, *args, **options)  # type: ignore[misc]
        step.logged[-1][1].update(
            {name: values.pop() for name, values in logged.items() if len(values) > before.get(name, 0)}
        )
        # A mean over no supervised token is not a number.
        return (loss if step.weight else torch.nan_to_num(loss)) * step.weight

    def _collected_values(self) -> dict[str, list[float]]:
        """Return, by name, the values that the trainer has collected since its last log entry."""
        return cast(dict[str, list[float]], getattr(self, "_metrics", {}).get("train", {}))

    @property
    def _divisor_kind(self) -> str:
        """Kind of the loss's divisor: `tokens`, `rows`, or `step` for a constant of the step."""
        loss = getattr(self, "loss_type", "")  # RLOO has one loss
        return "step" if loss in _DIVIDED_BY_STEP else "tokens" if loss == "bnpo" else "rows"

    def _make_microbatches(self, batches: list[Any]) -> list[tuple[dict[str, Any], float, BatchCounts]]:
        """Return inputs, weight and counts of each microbatch of this rank in a step."""
        step, rank, by = self._balance, self.args.process_index, self._divisor_kind
        split = [split_batch(batch) for batch in batches]
        divisors = [
            float(batch["num_items_in_batch"]) if by == "step" else max(getattr(BatchCounts.from_batch(batch), by), 1)
            for batch in batches
        ]
        ranks = step.gather_lengths(split, divisors)
        pools, lengths = [one.rows for one in split], [own for own, _ in ranks]
        if len({divisor for _, (own,) in ranks for divisor in own}) == 1:
            pools, lengths = [list(chain(*pools))], [[list(chain(*own))] for own in lengths]
        if len(pools) == 1 and len(ranks) > 1 and step.move_rows:
            cuts = [self._exchange_microbatches([own for (own,) in lengths], pools[0])]
        else:
            cuts = [
                [[rows[index] for index in indices] for indices in step.microbatches(own, rank)]
                for rows, own in zip(pools, zip(*lengths, strict=True), strict=True)
            ]
        found = []
        for microbatches, divisor in zip(cuts, divisors, strict=False):
            for rows in microbatches:
                # A microbatch of weight 0 keeps the ranks in step.
                inputs = join_rows(rows or pools[0][:1], pad_token_id=step.pad_token_id)
                counts = BatchCounts.from_batch(inputs) if rows else BatchCounts(0, 0, 0)
                found.append((inputs, bool(rows) if by == "step" else getattr(counts, by) / divisor, counts))
                step.counts.tokens += int(counts.attended)
        step.counts.steps += 1
        step.counts.microbatches += len(found)
        loads = [max(int(held.attended), 1) for _, _, held in found if held.rows]
        step.counts.add_microbatches(loads, step.max_tokens)
        self._warn_of_limit([(inputs["prompt_mask"], inputs["completion_mask"]) for inputs, _, _ in found], loads)
        return found

    def _warn_of_limit(self, masks: list[tuple[torch.Tensor, torch.Tensor]], loads: list[int]) -> None:
        """
        Warn in the first step if most rows exceed the token limit of a microbatch. Warn once if a
        microbatch exceeds the limit with its padding, and nothing leaves padding out.

        Args:
            masks: Masks of the prompts and of the answers of each microbatch.
            loads: Number of tokens of each microbatch that has rows.
        """
        step, most = self._balance, self._balance.max_tokens
        rows, long = sum(len(prompts) for prompts, _ in masks), [load for load in loads if load > most]
        if step.counts.steps == 1 and 2 * len(long) > rows:
            log.warning("%s of %s in the first step %s longer than %s tokens, up to %s, so each is a microbatch by "
                        "itself: raise max_tokens", f"{len(long):,}", counted(rows, "row"), verb_for(len(long)),
                        f"{most:,}", f"{max(long):,}")  # fmt: skip
        shapes = [(len(prompts), prompts.shape[1] + answers.shape[1]) for prompts, answers in masks]
        largest, (num, _) = max((num * width * (num > 1), (num, width)) for num, width in shapes)
        if largest > most and not step.padded and not step.has_warned:
            step.has_warned = True
            if not any(module in HOOKED for module in self.model.modules()):
                log.warning("a microbatch of %s has %s positions with padding, but max_tokens is %s: call "
                            "unpad(trainer.model), or pass padded=True", counted(num, "row"), f"{largest:,}",
                            f"{most:,}")  # fmt: skip

    def _exchange_microbatches(self, lengths: list[list[int]], rows: list[Row]) -> list[list[Row]]:
        """
        Exchange rows between all ranks, and return the microbatches of this rank.

        Args:
            lengths: Number of tokens of each row, by rank.
            rows: Rows of this rank.
        """
        rank, sizes = self.args.process_index, list(map(len, lengths))
        owners, first = np.repeat(np.arange(len(sizes)), sizes), sum(sizes[:rank])
        sharding = self._balance.shard_rows(list(chain(*lengths)), shards=len(sizes))
        shards = [sharding.shard(other)[0] for other in range(len(sizes))]
        outgoing = [
            {int(index): rows[index - first] for index in np.unique(shard.indices) if owners[index] == rank}
            for shard in shards
        ]
        held, own = _exchange_rows(outgoing, self.args.device), shards[rank]
        self._balance.counts.moved += sum(bool(owners[index] != rank) for index in held)
        return [
            [held[index] for index, weight in zip(own.indices[a:b].tolist(), own.weights[a:b], strict=True) if weight]
            for a, b in own.boundaries
        ]

    def _log_step(self) -> None:
        """
        Log each value's mean, minimum or maximum over all ranks' microbatches, once for each batch
        of the step.
        """
        step, logged = self._balance, self._collected_values()
        batches: list[Logged] = [
            {name: (value, getattr(counts, self._log_weight_field(name))) for name, value in values.items()}
            for counts, values in step.logged
        ]
        if is_old_trl():  # takes extremes of means of batches
            own = weighted_means(batches, {})
            batches = [{name: one for name, one in batch.items() if name not in _EXTREMES} for batch in batches]
            batches.append({name: (value, 1) for name, value in own.items() if name in _EXTREMES})
        for name, value in sorted(weighted_means(gather_object(batches), _EXTREMES).items()):
            logged[name].extend([value] * self.current_gradient_accumulation_steps)
        step.logged.clear()

    def _log_weight_field(self, name: str) -> str:
        """Return the field of `BatchCounts` that is the weight of logged value *name*."""
        by_token = "clip_ratio" in name and getattr(self, "importance_sampling_level", None) == "token"
        return "tokens" if by_token or name in {"entropy", "kl"} else "rows"

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Any, attention_mask: Any, logits_to_keep: int, batch_size: Any = None, **given: Any
    ) -> Any:  # fmt: skip
        """
        Return log-probabilities and entropies of answers, computed in microbatches under a token
        limit.

        Only calls with *batch_size*, which compute no gradients, are divided; other calls pass
        through unchanged.
        """
        compute = super()._get_per_token_logps_and_entropies  # type: ignore[misc]
        if batch_size is None:
            return compute(model, input_ids, attention_mask, logits_to_keep, **given)
        step, answer = self._balance, slice(-logits_to_keep, None)
        flags = {name: value for name, value in given.items() if isinstance(value, bool)}
        batch = {name: value for name, value in given.items() if name not in flags}
        batch |= {
            "prompt_ids": input_ids[:, :-logits_to_keep], "completion_ids": input_ids[:, answer],
            "prompt_mask": attention_mask[:, :-logits_to_keep], "completion_mask": attention_mask[:, answer],
        }  # fmt: skip
        split = split_batch(batch)
        lengths = [own for (own,), _ in step.gather_lengths([split])]
        cuts = step.microbatches(lengths, self.args.process_index, step.logprob_max_tokens)
        parts = []
        for indices in cuts:
            rows = join_rows([split.rows[index] for index in indices or [0]], pad_token_id=step.pad_token_id)
            mask = torch.cat([rows.pop("prompt_mask"), rows.pop("completion_mask")], 1)
            prompts, answers = rows.pop("prompt_ids"), rows.pop("completion_ids")
            num, width = answers.shape
            found = compute(model, torch.cat([prompts, answers], 1), mask, width, batch_size=num, **rows, **flags)
            padding = (0, logits_to_keep - width)
            parts.append([one if one is None else pad(one, padding)[: len(indices)] for one in found])
        order = torch.tensor(list(chain(*cuts))).argsort().to(input_ids.device)
        return tuple(one[0] if one[0] is None else torch.cat(one)[order] for one in zip(*parts, strict=True))


def _exchange_rows(outgoing: list[dict[int, Row]], device: Any) -> dict[int, Row]:
    """
    Send rows to each rank, this one included, and return the received rows by row number.

    Args:
        outgoing: Rows for each rank, by row number; their tensors may be views of larger tensors.
        device: Device of the rows that are returned.
    """
    packed = []
    for rows in outgoing:
        buffer = BytesIO()
        torch.save(send_to_device(recursively_apply(torch.clone, rows), "cpu"), buffer)
        packed.append(torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8))
    sizes = torch.tensor([len(part) for part in packed], device=device)
    coming = torch.empty_like(sizes)
    torch.distributed.all_to_all_single(coming, sizes)
    received = torch.empty(int(coming.sum()), dtype=torch.uint8, device=device)
    torch.distributed.all_to_all_single(received, torch.cat(packed).to(device), coming.tolist(), sizes.tolist())
    arrived: dict[int, Row] = {}
    for part in torch.split(received.cpu(), coming.tolist()):
        arrived |= torch.load(BytesIO(part.numpy().tobytes()), weights_only=True)  # no pickle of other ranks is run
    return cast(dict[int, Row], send_to_device(arrived, device))
