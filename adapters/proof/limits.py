"""Differences between packed and alone that rounding explains, for a model of any size."""

import math
from typing import Any

import torch

from packplan.core.equality import Precision, loaded_limit

_ENOUGH = 8
"""Tokens of a sample, of which half is no accident."""

_TF32 = 2.0**-10
"""Step of float32 products that PyTorch may round for speed."""

_OTHER_EXPERTS = 0.1
"""
Difference that another choice of experts may add to a sample's median token.

0.07 was measured.
"""


def precision_of(model: torch.nn.Module) -> Precision:
    """Return the precision of a model's weights."""
    names: dict[torch.dtype, Precision] = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
    return names.get(next(model.parameters()).dtype, "float32")


def limit_of(model: torch.nn.Module, precision: Precision | None = None) -> float:
    """
    Return the largest difference of packed logits that rounding explains; *precision* None is that
    of the weights.
    """
    return loaded_limit(_epsilon_of(model, precision), layers=_layers_of(model)) + (
        _OTHER_EXPERTS if rounds_choices(model) else 0
    )


def rounds_choices(model: torch.nn.Module) -> bool:
    """
    Return whether rounding may change the weights that a token passes.

    This holds for experts chosen by scores of 16 bits.
    """
    return _epsilon_of(model) >= _TF32 and any("expert" in name for name, _ in model.named_modules())


def _layers_of(model: torch.nn.Module) -> int:
    """Return the number of layers, by the configuration or else by the longest list of modules."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    lists = (len(one) for one in model.modules() if isinstance(one, torch.nn.ModuleList))
    return max(1, getattr(text, "num_hidden_layers", None) or max(lists, default=1))


def _epsilon_of(model: torch.nn.Module, precision: Precision | None = None) -> float:
    """Return the step of the type to which a model's products are rounded."""
    precision = precision or precision_of(model)
    if precision == "float32" and torch.get_float32_matmul_precision() != "highest":
        return _TF32
    return float(torch.finfo(getattr(torch, precision)).eps)


def difference_of(tokens: torch.Tensor, *, typical: bool) -> float:
    """
    Return the difference of a sample's worst token, or of its typical one if it has enough.

    Args:
        tokens: Difference of each token; shape (tokens,).
        typical: Whether experts may be chosen otherwise, so that single tokens say nothing.
    """
    if not bool(tokens.isfinite().all()):
        return math.inf
    if typical:
        return float(tokens.median()) if len(tokens) >= _ENOUGH else 0.0
    return float(tokens.max())
