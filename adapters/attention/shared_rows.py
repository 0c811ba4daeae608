"""
Rows that several ranks compute together: each rank computes a part of every row.

`share_rows` makes a model compute this rank's part of each row. All ranks of a group call the model
with the same row. Before the decoder, the row is divided, and each rank continues with its own
tokens. Only attention needs all tokens, so the ranks exchange values for it (`attention.shares`).
After the decoder, the parts are joined again. In a call with labels, each rank computes the loss of
its part instead, and these losses are added up. So each rank gets the results of the whole row, and
the mean of the ranks' gradients is the row's gradient. Every rank encodes all images of the row.

`RowGroups` has the groups of ranks that share a row. Either the number of ranks is the same for
each row, or it depends on the row's tokens and is called the row's degree. Groups without a common
rank can compute rows of different degrees at the same time. All ranks call the model equally often.
So every rank runs the same number of collectives of all ranks, such as those of FSDP. Between two
such collectives, ranks communicate only within their group, about the same row.

A call of several padded rows is not shared: each rank computes all of its rows. A row is padded at
its end until its ranks can divide it; the padding counts as one more sample.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from datetime import timedelta
from functools import wraps
from inspect import signature
from threading import get_ident
from typing import Any

import attrs
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  # its usual name
from transformers.loss.loss_utils import ForCausalLMLoss

from packplan.adapters.attention import NAME, ROWS_NAME, attention_names
from packplan.adapters.attention.packed_row import (
    PackedRow,
    current_row,
    hold_variable,
    read_row,
    restore_rows_on_recompute,
    using_row,
)
from packplan.adapters.attention.shares import RowShare, gather_rows
from packplan.adapters.families import trained_part
from packplan.core.batch import IGNORED_LABEL, pack_degrees
from packplan.core.context_parallel import PackedLayout
from packplan.core.equality import VARLEN, AttentionChoice
from packplan.core.errors import MismatchError, ModelError

_NOT_BY_TOKEN = ("pixel", "image", "video", "deepstack", "past_key_values", "cache_position", "attention_mask")
"""Prefixes of the names of arguments whose axes are not the row's tokens."""

_DEGREE: ContextVar[int | None] = ContextVar("degree", default=None)
"""
Number of ranks that share each row, whatever its length; None if it depends on the row's length.
"""

_KEEPS_PART: ContextVar[bool] = ContextVar("keeps_part", default=False)
"""Whether the input of the model's head is this rank's part of the row instead of the whole row."""


def sharing_by(degree: int | None) -> AbstractContextManager[None]:
    """
    Inside this context, let *degree* ranks share each row, whatever the row's length.

    Args:
        degree: Number of ranks in a group of `RowGroups`. With a degree of 1, each rank computes
            whole rows, as a reference for shared rows. With None, the number of ranks depends on
            the row's length.
    """
    return hold_variable(_DEGREE, degree)


@attrs.frozen(eq=False)
class RowGroups:
    """
    Groups of consecutive ranks that share rows. Every rank has to create the groups in the same
    order.

    Group g of size n has the ranks g * n to g * n + n - 1.
    """

    by_degree: Mapping[int, dist.ProcessGroup]
    """Number of ranks, above 1 -> this rank's group of this size."""

    packing_length: int | None = None
    """
    Maximum number of tokens of a row that one rank computes alone. A longer row is shared by the
    fewest ranks (2, 4, 8, …) that get at most this number each. If even the largest group is too
    small, it shares the row. None makes the largest group share every row.
    """

    @classmethod
    def make(cls, degrees: Iterable[int], timeout: timedelta, *, packing_length: int | None = None) -> RowGroups | None:
        """
        Create the groups of this rank; return None if no rank shares a row. Every rank has to call
        this method.

        Args:
            degrees: Numbers of ranks that share a row, in any order and with repeats.
            timeout: Maximum time of a collective within a group.
            packing_length: Value of the field `packing_length`.
        """
        sizes = sorted({int(degree) for degree in degrees if degree > 1})
        if not sizes:
            return None
        made = {size: dist.new_subgroups(group_size=size, timeout=timeout)[0] for size in sizes}  # type: ignore[no-untyped-call]
        return cls(made, packing_length)

    @property
    def degrees(self) -> tuple[int, ...]:
        """Numbers of ranks that may compute a row, smallest first; 1 only with `packing_length`."""
        return (*([] if self.packing_length is None else [1]), *sorted(self.by_degree))

    def degree_of(self, num_tokens: int) -> int:
        """Return the number of ranks that share a row of *num_tokens* tokens."""
        if (degree := _DEGREE.get()) is not None:
            return degree
        if self.packing_length is None:
            return self.degrees[-1]
        return int(pack_degrees(np.array([num_tokens]), self.packing_length, self.degrees[-1])[0])

    def group_of(self, num_tokens: int) -> dist.ProcessGroup | None:
        """
        Return the group that shares a row of *num_tokens* tokens; None if this rank computes it
        alone.
        """
        return self.by_degree.get(self.degree_of(num_tokens))

    def weight_of(self, num_tokens: int) -> float:
        """
        Return the weight of a row's loss on this rank, so that the row counts once over all ranks.

        The weight is 1 / degree. If the same number of ranks shares every row, the weight is 1,
        since all rows then count equally often.
        """
        return 1.0 if self.packing_length is None else 1 / self.degree_of(num_tokens)

    def is_first(self, num_tokens: int) -> bool:
        """
        Return whether this rank is the first of the ranks that share a row of *num_tokens* tokens.
        """
        group = self.group_of(num_tokens)
        return group is None or group.rank() == 0

    def counts(self, num_tokens: int) -> bool:
        """
        Return whether this rank counts the tokens of a row towards a loss's divisor.

        If the same number of ranks shares every row, all ranks count the row's tokens. Otherwise
        only the first rank of the row's group counts them.
        """
        return self.packing_length is None or self.is_first(num_tokens)


def share_rows(model: Any, groups: RowGroups, *, logits: bool = False) -> None:
    """
    Let groups of ranks share the packed rows that a model computes. Every rank has to call this
    function.

    The model has to use Packplan's own attention (`set_attention`, `unpad`). All ranks of a group
    have to call the model with the same row. Every rank gets the loss of the whole row, and its
    logits and hidden states too unless *logits* leaves them out. The row's gradient is the mean of
    the gradients of the ranks that share it.

    Args:
        model: Model of transformers, perhaps with adapters.
        groups: Groups of ranks that share rows.
        logits: Whether calls with labels return logits too. If False, a call with transformers'
            causal loss returns no logits, and only this rank's part of the hidden states. No rank
            then computes the logits of the whole row.

    Raises:
        MismatchError: A later call of the model raises this error if ranks of a group pass
            different rows.
    """
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    part = trained_part(model)

    def divide_current_row() -> tuple[PackedRow, RowShare] | None:
        row = current_row()
        group = None if row is None else groups.group_of(len(row.sample_ids))
        return None if row is None or group is None else divide_row(row, group)

    shared = SharedRows(part.get_decoder(), divide_current_row, joins=True, mixes=groups.packing_length is not None)
    original, parameters = model.forward, signature(model.forward)

    @wraps(original)
    def forward(*arguments: Any, **options: Any) -> Any:
        given = {**parameters.bind_partial(*arguments).arguments, **options}
        group = groups.group_of(count_tokens(given)) if shared.is_active else None
        if group is None:
            return original(*arguments, **options)
        _require_same_rows(given, group)
        row = _read_row(given)
        if row is None:
            return original(*arguments, **options)
        with using_row(row):
            if logits or not _asks_for_usual_loss(part, given):
                return original(*arguments, **options)
            _, share = divide_row(row, group)
            keep, targets = _select_targets(given, share)
            with hold_variable(_KEEPS_PART, value=True):
                output = original(**{**given, "labels": None} | ({} if keep is None else {"logits_to_keep": keep}))
        own = F.cross_entropy(output["logits"][0].float(), targets, ignore_index=IGNORED_LABEL, reduction="sum")
        num_items = given.get("num_items_in_batch")
        num_items = (given["labels"][:, 1:] != IGNORED_LABEL).sum() if num_items is None else num_items
        output["loss"], output["logits"] = share.gather(own[None], 0).sum() / num_items, None
        return output

    model.forward = forward


def count_tokens(given: Mapping[str, Any]) -> int:
    """Return the number of tokens in a model's call, without padding."""
    mask, values = given.get("attention_mask"), given.get("input_ids")
    if isinstance(mask, torch.Tensor) and mask.dim() == 2:
        return int(mask.sum())
    values = given["inputs_embeds"] if values is None else values
    return int(values.shape[0] * values.shape[1])


def _read_row(given: Mapping[str, Any]) -> PackedRow | None:
    """
    Return the row of a call as `read_row` does. A call without position ids is one sample if it has
    one row of ids, no padding and no cache.
    """
    positions, mask, values = (given.get(name) for name in ("position_ids", "attention_mask", "input_ids"))
    if positions is not None or values is None:
        return read_row(positions, mask)
    is_one = len(values) == 1 and count_tokens(given) == values.numel() and given.get("past_key_values") is None
    return PackedRow(torch.zeros_like(values[0])) if is_one else None


def _require_same_rows(given: dict[str, Any], group: dist.ProcessGroup) -> None:
    """Raise MismatchError if tokens, positions or masks differ between the ranks of a group."""
    found = (given.get(name) for name in ("input_ids", "position_ids", "attention_mask"))
    rows = [one.flatten().long() for one in found if isinstance(one, torch.Tensor)]
    sums = [(row * torch.arange(1, len(row) + 1, device=row.device)).sum() for row in rows]
    gathered = gather_rows(torch.stack(sums)[None], group) if sums else torch.zeros(1)
    if bool((gathered != gathered[0]).any()):
        fact = "ranks that share a row were given different rows: pass the same batches to all ranks of a group"
        raise MismatchError("ranks_disagree", fact)


def attention_for_shared_rows(choice: AttentionChoice) -> AttentionChoice:
    """
    Return *choice* with `keeps_rows`; ModelError if ranks cannot share rows under its attention.
    """
    if choice.name != VARLEN or choice.split:
        fact = (
            f"ranks share rows only under attention {VARLEN} and without layers that carry a state, but the model has "
            f"{choice}: set sequence_parallel_size to 1"
        )
        raise ModelError("attention", fact)
    return attrs.evolve(choice, keeps_rows=True)


def _asks_for_usual_loss(model: Any, given: dict[str, Any]) -> bool:
    """
    Return whether the loss of a call is the mean of its tokens' cross entropies, and nothing else.
    """
    if given.get("labels") is None or given.get("shift_labels") is not None or hasattr(model, "score"):
        return False  # a head named `score` has a label for each sample
    routes = given.get("output_router_logits") or getattr(model.config.get_text_config(), "output_router_logits", False)
    keeps = given.get("logits_to_keep")
    is_known = keeps.dtype == torch.bool if isinstance(keeps, torch.Tensor) else not keeps
    return getattr(model, "loss_function", None) is ForCausalLMLoss and is_known and not routes


def _select_targets(given: dict[str, Any], share: RowShare) -> tuple[torch.Tensor | None, torch.Tensor]:
    """
    Return a mask of this rank's tokens whose logits are needed (None for all), and the targets of
    these tokens.

    If `logits_to_keep` is a tensor, as in calls of ms-swift, only kept tokens have labels. The
    target of a kept token is then the label of the next kept token. Otherwise, every token has a
    label.
    """
    keep, following = given.get("logits_to_keep"), F.pad(given["labels"][0, 1:], (0, 1), value=IGNORED_LABEL)
    targets = following.new_full((share.num_positions,), IGNORED_LABEL)
    if not isinstance(keep, torch.Tensor):
        targets[: share.num_tokens] = following
        return None, targets[share.positions]
    targets[: share.num_tokens][keep] = following
    kept = F.pad(keep, (0, share.num_positions - share.num_tokens))[share.positions]
    return kept, targets[share.positions][kept]


def divide_row(row: PackedRow, group: dist.ProcessGroup) -> tuple[PackedRow, RowShare]:
    """
    Return a row with its padding as one more sample, and this rank's part of the row.

    The length of the padded row is a multiple of the number of ranks.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    part = -(-len(row.sample_ids) // size)
    padding = part * size - len(row.sample_ids)
    own = torch.cat([row.sample_ids, (row.sample_ids[-1:] + 1).expand(padding)])
    columns = row.columns if row.columns is None else F.pad(row.columns, (0, padding))
    share = RowShare(group, torch.arange(part, device=own.device) + rank * part, len(row.sample_ids))
    return PackedRow(own, columns, share), share


class SharedRows:
    """Hooks that make a decoder compute only this rank's part of each row that a group shares."""

    def __init__(
        self, decoder: Any, divide: Callable[[], tuple[PackedRow, RowShare] | None], *, joins: bool, mixes: bool = False
    ) -> None:
        """
        Hook a decoder.

        Args:
            decoder: Text model of transformers, without its head.
            divide: Function that returns the row of the current call, with this rank's part; None
                if the call is not shared.
            joins: Whether to gather the whole row from all ranks after the decoder.
            mixes: Whether other ranks may compute whole rows at the same time. If they may, modules
                are called in the same order for all rows, since ranks with sharded weights wait for
                each other at each module.
        """
        self._decoder, self._divide, self._joins, self._mixes = decoder, divide, joins, mixes
        self._signature = signature(decoder.forward)
        # For each thread: the rank's part, its open contexts, and the arguments of the whole row.
        self._open: dict[int, list[tuple[RowShare | None, ExitStack, dict[str, Any]]]] = defaultdict(list)
        uncompiled: Any = torch.compiler.disable  # rows would each need a program of their own
        self._hooks = [
            decoder.register_forward_pre_hook(uncompiled(self._cut_inputs), with_kwargs=True),
            # Before hooks that put back padding, which take the whole row.
            decoder.register_forward_hook(
                uncompiled(self._join_output), prepend=True, with_kwargs=True, always_call=True
            ),
        ]

    @property
    def is_active(self) -> bool:
        """Whether rows may be shared; sharing needs varlen attention."""
        return self._decoder.config._attn_implementation in (NAME, ROWS_NAME)  # noqa: SLF001  # has no public name

    def remove(self) -> None:
        """Remove the hooks from the decoder."""
        for hook in self._hooks:
            hook.remove()

    def _cut_inputs(self, _: Any, args: Any, kwargs: Any) -> Any:
        divided, inside = self._divide() if self.is_active else None, ExitStack()
        given = {**self._signature.bind_partial(*args).arguments, **kwargs}
        if divided is None:
            self._open[get_ident()].append((None, inside, {}))
            if not self._mixes:
                return None
        if given.get("inputs_embeds") is None:
            # Embedded whole, so that each rank has the gradients of all embeddings.
            given["inputs_embeds"] = self._decoder.get_input_embeddings()(given.pop("input_ids"))
        if divided is None:
            return (), given
        row, share = divided
        options = _cut_arguments(given, row, share)
        restore_rows_on_recompute(self._decoder.modules())
        inside.enter_context(using_row(row))
        self._open[get_ident()].append((share, inside, given))
        return (), options

    def _join_output(self, _: Any, __: Any, kwargs: dict[str, Any], output: Any) -> Any:
        if not self._open[get_ident()]:  # the call was refused
            return None
        share, inside, given = self._open[get_ident()].pop()
        inside.close()
        if share is None or output is None or not self._joins or _KEEPS_PART.get():
            return None
        kwargs.update(given)  # hooks that come next, as ms-swift's for classifiers, read positions of the whole row
        return _join_parts(output, share)


def _cut_arguments(given: dict[str, Any], row: PackedRow, share: RowShare) -> dict[str, Any]:
    """
    Return the arguments of a decoder for this rank's tokens.

    Args:
        given: Arguments of the whole row.
        row: The row.
        share: This rank's part of the row.
    """
    mask, num = given.get("attention_mask"), given["inputs_embeds"].shape[1]
    if mask is not None and not isinstance(mask, torch.Tensor):
        raise ModelError("attention", "the model makes masks outside of its decoder: set sequence_parallel_size to 1")
    if mask is not None and not bool(mask.all()):
        raise ValueError("a row that ranks share takes no attention_mask: leave it out")
    if num not in (share.num_tokens, len(share.positions)):
        message = (
            f"the row has {share.num_tokens} positions, {len(share.positions)} of them on a rank, but {num} are "
            "given: pass the whole row or the rank's part"
        )
        raise ValueError(message)
    cut = {**given, "use_cache": False}
    for name, value in given.items():
        axis = -1 if name == "position_ids" else 1
        is_by_token = isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[axis] == share.num_tokens
        if is_by_token and not name.startswith(_NOT_BY_TOKEN):
            cut[name] = share.take(value, axis)
    if cut.get("position_ids") is None:
        cut["position_ids"] = (share.positions - row.starts_by_token[share.positions])[None]
    # With a mask of ones, transformers does not look for samples in the positions.
    cut["attention_mask"] = torch.ones(1, len(share.positions), dtype=torch.long, device=share.positions.device)
    images = given.get("visual_pos_masks")
    if images is not None:
        cut["visual_pos_masks"] = cut["visual_pos_masks"] & (share.positions < share.num_tokens)
        # Features of image tokens that deeper layers add, one for each token of an image.
        kept = torch.isin(images[0].nonzero()[:, 0], share.positions)
        cut["deepstack_visual_embeds"] = [features[kept] for features in given["deepstack_visual_embeds"]]
    return cut


def _join_parts(value: Any, share: RowShare) -> Any:
    """Join the ranks' parts of output tensors, whose shape is (1, part, …) or (part, …)."""
    if isinstance(value, dict):
        for name in list(value):
            value[name] = _join_parts(value[name], share)
        return value
    if isinstance(value, (tuple, list)):
        return type(value)(_join_parts(one, share) for one in value)
    if not isinstance(value, torch.Tensor) or value.dim() < 2:
        return value
    axes = [axis for axis in (1, 0) if value.shape[axis] == len(share.positions)]
    return share.gather(value, axes[0]).narrow(axes[0], 0, share.num_tokens) if axes else value


@contextmanager
def context_parallel(model: Any, *, layout: PackedLayout, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """
    Make a model compute only this rank's part of a packed row. A layout divides the row into parts.

    Inside this context, call the model with this rank's part as `input_ids` of shape (1,
    num_positions / cp_size). Or pass the whole row, perhaps with images, which every rank then
    embeds. The model returns the logits of the part. By default, the position ids are the layout's.
    With gradient checkpointing, run the backward pass inside this context too, since it recomputes
    layers.

    Args:
        model: Model of transformers with causal attention, which may be inside DDP or an engine of
            DeepSpeed, or be sharded by FSDP 2.
        layout: Layout of the whole row, the same on every rank.
        group: Ranks that share the row; all ranks by default.

    Raises:
        ValueError: The layout is for another number of ranks. A call of the model raises this error
            if the part has a wrong size, or if an attention mask hides tokens.
    """
    ranks: Any = group or dist.group.WORLD
    if layout.cp_size != ranks.size():
        raise ValueError(f"the layout is for {layout.cp_size} ranks, but the group has {ranks.size()}: make another")
    model = getattr(model, "module", model)
    arrays = (layout.positions(ranks.rank()), layout.restore, layout.sequence)
    own, restore, sequence = (torch.as_tensor(array, device=model.device) for array in arrays)
    share = RowShare(ranks, own, layout.num_positions, restore)
    row = PackedRow(sequence, share=share)
    decoder, before = model.get_decoder(), attention_names(model.config)
    # A vision tower attends as before, on every rank to all patches.
    text = {name: ROWS_NAME for name in before if not name or getattr(model.config, name) is decoder.config}
    model.set_attn_implementation(before | text)
    shared = SharedRows(decoder, lambda: None if _DEGREE.get() == 1 else (row, share), joins=False)
    try:
        yield
    finally:
        shared.remove()
        model.set_attn_implementation(before)
