"""
Training on preference data (DPO, KTO, reward models), whose packs differ in their number of
samples.

TRL's loss of a batch is the mean over its samples. `TrainsPairs` weights the loss of a batch by its
share of the step's samples on all ranks. So the loss of the step is the mean over its samples.
Values that TRL logs are also means over the step's samples or their tokens, or the minimum or
maximum of a reward. TRL gathers the values of all ranks for each batch, which requires equally many
samples on every rank. Here, each rank collects its own values, and the ranks exchange them once a
step.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import attrs
import torch
from accelerate.utils import gather_object

from packplan.adapters.hf.first_pack import LocalAccelerator
from packplan.adapters.hf.following import ServesPacks
from packplan.adapters.loaders.packs import PACK
from packplan.adapters.models import replace_attributes
from packplan.core.config.identity import PREFERENCE_ARGUMENTS

_EXTREMES = {"min_reward": min, "max_reward": max}
"""Name of a logged value that is a minimum or maximum, not a mean -> function that computes it."""

_BY_TOKEN = ("logits/chosen", "logits/rejected", "entropy", "mean_token_accuracy")
"""Names of logged values that are means over tokens."""

_IS_CHOSEN = {"chosen": True, "rejected": False, "mean_token_accuracy": True}
"""
Last part of a logged value's name -> True if it is a mean over chosen answers, False for rejected
answers. Values with other names are means over all rows.
"""


Logged = dict[str, tuple[float, float]]
"""Logged values of a batch, by name, each with its weight in the mean of the step."""


def weighted_means(batches: Sequence[Logged], extremes: Mapping[str, Callable[..., Any]]) -> dict[str, float]:
    """
    Return the weighted mean of each value over batches; 0 if all weights are 0.

    Args:
        batches: Logged values of each batch.
        extremes: Name of a value that is a minimum or maximum, not a mean -> function that computes
            it.

    >>> weighted_means([{"a": (1.0, 3), "b": (4.0, 1)}, {"a": (5.0, 1), "b": (2.0, 1)}], {"b": min})
    {'a': 2.0, 'b': 2.0}
    """
    found = {}
    for name in dict.fromkeys(chain(*batches)):
        own = [batch[name] for batch in batches if name in batch and batch[name][1]]
        mean = sum(value * weight for value, weight in own) / (sum(weight for _, weight in own) or 1)
        found[name] = extremes[name](own)[0] if own and name in extremes else mean
    return found


@attrs.define
class _Step:
    """State of an optimizer step, or of an evaluation."""

    samples: int = 0
    """Number of samples of the step on all ranks; 0 in an evaluation."""

    batches_left: int = 0
    """Number of batches of the step that this rank has not computed yet; 0 in an evaluation."""

    logged: list[Logged] = attrs.field(factory=list)
    """Values that the trainer has logged for each batch."""


class TrainsPairs(ServesPacks):
    """Mixin that makes a trainer of TRL train packs of preference data."""

    fixed_arguments = PREFERENCE_ARGUMENTS
    loss_of_samples = "mean"
    current_gradient_accumulation_steps: int
    _metrics: Any = None  # KTO of TRL before 1.0 has none: it gathers and logs sums
    _step: _Step | None = None  # None in the comparison of the first pack too

    def get_batch_samples(self, *args: Any) -> Any:
        """Return the batches of a step, and count the samples of the step over all ranks."""
        self._step = None
        batches, num_items = super().get_batch_samples(*args)
        num_samples = torch.tensor(sum(map(self.count_learned, batches)))
        self._step = _Step(int(self.sum_over_ranks(num_samples)), len(batches))
        return batches, num_items

    def count_learned(self, inputs: dict[str, Any]) -> int:
        """Return the number of samples of a batch."""
        return len((self.train_packs if self._evaluated is None else self._eval_packs).packs[inputs[PACK]])

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **options: Any) -> Any:
        """Return the loss of a batch, weighted by the batch's share of the step's samples."""
        step, logged = self._step, defaultdict[str, Any](lambda: defaultdict(list))
        own = {"_metrics": logged, "accelerator": LocalAccelerator(self.accelerator)}
        with replace_attributes(self, **(own if PACK in inputs and self._metrics is not None else {})):
            loss = super().compute_loss(model, inputs, *args, **options)
        if step is None or PACK not in inputs:
            return loss
        if logged and not self._repeats:
            step.logged.append(
                self._weigh({name: held[-1] for own in logged.values() for name, held in own.items()}, inputs)
            )
        if not step.samples:
            return loss
        step.batches_left -= 1
        if not step.batches_left:
            self._log_step(step)
        batches = self.accelerator.num_processes * self.current_gradient_accumulation_steps
        return loss * (batches * self.count_learned(inputs) / step.samples)

    def _weigh(self, values: dict[str, float], inputs: dict[str, Any]) -> Logged:
        """Return each logged value of a batch with its weight, a number of rows or tokens."""
        mask = inputs.get("completion_mask", inputs["attention_mask"])  # rewards have no mean over tokens
        if hasattr(self, "_truncate_inputs"):  # TRL before 1.0 truncates in the loss
            mask = self._truncate_inputs(inputs["input_ids"], inputs["attention_mask"], mask)[2]
        chosen = inputs.get("label", torch.arange(len(mask), device=mask.device) < self.count_learned(inputs))
        counts = torch.stack([torch.ones(len(mask), device=mask.device), mask[:, 1:].sum(1)])
        weights = {
            side: counts[:, own].sum(1).tolist()
            for side, own in {None: chosen | ~chosen, True: chosen, False: ~chosen}.items()
        }
        sides = {name: _IS_CHOSEN.get(name.rpartition("/")[2]) for name in values}
        return {name: (value, weights[sides[name]][name in _BY_TOKEN]) for name, value in values.items()}

    def evaluation_loop(self, *args: Any, **options: Any) -> Any:
        """Evaluate packs, and log values in which each sample counts once."""
        self._step = step = _Step()
        output = super().evaluation_loop(*args, **options)
        self._log_step(step)
        self._step = None
        return output

    def prediction_step(self, *args: Any, **options: Any) -> Any:
        """
        Compute a batch as the trainer does. A trainer without `_metrics` sums its values over
        ranks, so a repeated batch is then left out of these sums.
        """
        gather, share = self.accelerator.gather_for_metrics, float(not self._repeats)
        sums = {"gather_for_metrics": lambda one: gather(share * one)} if self._metrics is None else {}
        with replace_attributes(self.accelerator, **sums):
            return super().prediction_step(*args, **options)

    @property
    def _repeats(self) -> bool:
        return self._evaluated is not None and self._evaluated.next_is_repeated

    def _log_step(self, step: _Step) -> None:
        """Log each value's weighted mean, minimum or maximum over the batches of all ranks."""
        if self._metrics is None:
            return
        found = weighted_means(gather_object(step.logged), _EXTREMES)
        if {"rewards/chosen", "rewards/rejected"} <= found.keys():  # KTO has one side alone in some batches
            found["rewards/margins"] = found["rewards/chosen"] - found["rewards/rejected"]
        metrics = self._metrics["train" if self.model.training else "eval"]
        for name, value in found.items():
            metrics[name].append(value)
        metrics["num_tokens"] = [sum(gather_object([self._total_train_tokens]))]
