"""
Work of a model's text layers, computed from its config.json.

The work is computed from the keys of the config.json. These keys describe grouped or latent heads,
experts and shared experts, layers with a window or a chunk, and layers that carry a state. The
model type matters in
two cases only. The work of some types is unknown (`_UNKNOWN_TYPES`). For other types, this module
supplies values that a config.json leaves out or has no key for (`_DEFAULTS`). If a key looks like a
size and this module does not read it, the model's work is unknown.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import attrs
import numpy as np
from numpy.typing import NDArray

from packplan.core.errors import ModelError
from packplan.core.work.keys import ATTENTION_PRODUCTS, PRODUCT, ConfigKeys, Sizes

LayerKind = Literal["full", "window", "chunk", "delta", "conv"]

_LAYER_KINDS: Mapping[str, LayerKind] = {
    "full_attention": "full", "attention": "full", "sliding_attention": "window", "chunked_attention": "chunk",
    "linear_attention": "delta", "conv": "conv",
}  # fmt: skip
"""Name in `layer_types` of a config.json -> kind of layer."""

_DEFAULTS: Mapping[str, Sizes] = {
    "bitnet": {"mlp_products": 3},
    "bloom": {"mlp_products": 2},
    "openai-gpt": {"mlp_products": 2},
    "cohere2": {"sliding_window_pattern": 4},
    "gemma2": {"sliding_window_pattern": 2},
    "gemma3_text": {
        "sliding_window_pattern": 6, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        "vocab_size": 262208,
    },
    "qwen2": {"use_sliding_window": False},
    "qwen2_5_vl_text": {"use_sliding_window": False},
    "qwen2_moe": {"use_sliding_window": False},
    "qwen2_vl_text": {"use_sliding_window": False},
    "qwen3": {"use_sliding_window": False},
    "qwen3_moe": {"use_sliding_window": False},
    "qwen3_next": {"full_attention_interval": 4, "attn_output_gate": True, "head_dim": 256},
    "qwen3_5_text": {"full_attention_interval": 4, "attn_output_gate": True, "head_dim": 256},
    "qwen3_5_moe_text": {"full_attention_interval": 4, "attn_output_gate": True, "head_dim": 256},
    "starcoder2": {"mlp_products": 2},
}  # fmt: skip
"""
Model type -> values that its config.json leaves out, such as the number of products in its MLP or
an attention gate.
"""

_UNKNOWN_TYPES = {"ctrl", "diffllama", "falcon", "gpt_bigcode", "hunyuan_v1_moe", "longcat_flash", "modernbert-decoder"}
"""Model types whose work is unknown, because their keys do not describe their layers."""

_UNGATED = {"gelu", "gelu_new", "gelu_fast", "quick_gelu", "relu", "relu2", "xielu"}
"""
Activations of MLPs with two products. MLPs with other activations have a gate, which is a third
product.
"""

DELTA_CHUNK = 64
"""Number of tokens in a chunk of the delta rule, in transformers and in GPU kernels."""


@attrs.frozen
class LocalAttention:
    """Work of attention layers that attend only within a window or a chunk."""

    per_pair: float
    """FLOPs per pair of tokens, summed over these layers."""

    tokens: int
    """Number of tokens in a window, including the token itself, or in a chunk."""

    in_chunks: bool = False
    """
    Whether tokens attend within their chunk. If false, tokens attend to a window of the previous
    tokens.
    """

    def pairs(self, lengths: NDArray[np.float64]) -> NDArray[np.float64]:
        """
        Return the number of token pairs in rows of *lengths* tokens; same shape as *lengths*.

        >>> LocalAttention(1, 3).pairs(np.array([2.0, 5.0])).tolist()
        [3.0, 12.0]
        >>> LocalAttention(1, 3, in_chunks=True).pairs(np.array([2.0, 5.0])).tolist()
        [3.0, 9.0]
        """
        if self.in_chunks:
            rest = lengths % self.tokens
            chunks = lengths // self.tokens
            pairs: NDArray[np.float64] = chunks * self.tokens * (self.tokens + 1) / 2 + rest * (rest + 1) / 2
            return pairs
        beyond = np.maximum(lengths - self.tokens, 0)
        within: NDArray[np.float64] = lengths * (lengths + 1) / 2 - beyond * (beyond + 1) / 2
        return within


def read_text_work(sizes: Sizes, *, model_type: str | None) -> dict[str, Any]:
    """
    Compute the forward work of a model's text layers, as fields of `core.work.model.WorkModel`.

    Args:
        sizes: The part of a config.json that describes the text model.
        model_type: Model type of this part, or of the whole model.

    Raises:
        ModelError: A size is missing, or the effect of a key on the work is unknown.
    """
    if model_type in _UNKNOWN_TYPES:
        raise ModelError("work", f"the work of model_type {model_type!r} is not known")
    keys = ConfigKeys(sizes, _DEFAULTS.get(model_type or "", {}))
    width = keys.size("hidden_size", "n_embd", "d_model")
    layers = keys.size("num_hidden_layers", "n_layer", "num_layers")
    kinds = Counter(_layer_kinds(keys, layers))
    head = width * keys.size("vocab_size")
    attending = kinds["full"] + kinds["window"] + kinds["chunk"]
    position, pair = _attention_multiplications(keys, width) if attending else (0, 0)
    projections, products = _delta_multiplications(keys, width) if kinds["delta"] else (0, 0)
    per_position = head + attending * position + kinds["delta"] * projections
    if kinds["conv"]:
        per_position += kinds["conv"] * (4 * width**2 + keys.size("conv_L_cache") * width)
    per_position += _mlp_multiplications(keys, width, layers)
    scale = PRODUCT * ATTENTION_PRODUCTS
    local = []
    if kinds["window"]:
        local.append(LocalAttention(scale * kinds["window"] * pair // 2, keys.size("sliding_window")))
    if kinds["chunk"]:
        chunk = keys.size("attention_chunk_size")
        local.append(LocalAttention(scale * kinds["chunk"] * pair // 2, chunk, in_chunks=True))
    if unread := keys.unread_sizes():
        named = ", ".join(unread[:5])
        raise ModelError("work", f"the effect of {named} in its config.json on the work is not known")
    return {
        "per_position": PRODUCT * per_position,
        "per_pair": scale * kinds["full"] * pair // 2,
        "local": tuple(local),
        "per_chunk": PRODUCT * kinds["delta"] * products,
    }


def _layer_kinds(keys: ConfigKeys, layers: int) -> list[LayerKind]:
    """Return the kind of each layer. Raise a ModelError if the work of a kind is not known."""
    named = keys.find("layer_types", "layers_block_type")
    window = keys.find("sliding_window")
    has_window = bool(window) and keys.find("use_sliding_window") is not False
    every = keys.find("sliding_window_pattern", "_sliding_window_pattern")
    first = keys.find("max_window_layers")
    interval = keys.find("full_attention_interval")
    keys.find("attention_chunk_size", "no_rope_layers", "no_rope_layer_interval")
    if named is not None:
        if others := sorted(set(named) - set(_LAYER_KINDS)):
            raise ModelError("work", f"the work of {', '.join(others)} layers is not known")
        kinds = [_LAYER_KINDS[name] for name in named]
        return ["full" if kind == "window" and not has_window else kind for kind in kinds]
    if interval:
        return ["full" if not number % interval else "delta" for number in range(1, layers + 1)]
    if has_window and every:
        return ["window" if number % every else "full" for number in range(1, layers + 1)]
    return [
        "full" if not has_window or (first is not None and number < first) else "window" for number in range(layers)
    ]


def _attention_multiplications(keys: ConfigKeys, width: int) -> tuple[int, int]:
    """
    Return the number of multiplications of an attention layer for one position, and for one pair of
    tokens.
    """
    if not (heads := keys.size("num_attention_heads", "n_head", "num_heads")):
        raise ModelError("work", "config.json has num_attention_heads 0, but a model needs at least 1")
    if (latent := keys.find_size("kv_lora_rank")) is not None:
        plain, rotated, value = (keys.size(key) for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
        keys.find("qk_head_dim", "head_dim", "num_key_value_heads")
        query, rank = heads * (plain + rotated), keys.find_size("q_lora_rank")
        asked = width * query if rank is None else width * rank + rank * query
        held = width * (latent + rotated) + latent * heads * (plain + value)
        return asked + held + heads * value * width, heads * (plain + rotated + value)
    size = keys.find_size("head_dim", "attention_head_dim", "kv_channels") or width // heads
    shared = keys.find_size("num_key_value_heads", "num_kv_heads") or heads
    gated = heads * size if keys.find("attn_output_gate") else 0
    return width * (2 * heads * size + 2 * shared * size + gated), 2 * heads * size


def _delta_multiplications(keys: ConfigKeys, width: int) -> tuple[int, int]:
    """
    Return the number of multiplications of a gated-delta-rule layer for one position, and for one
    chunk.
    """
    key, value = keys.size("linear_key_head_dim"), keys.size("linear_value_head_dim")
    heads = keys.size("linear_num_value_heads")
    keys_width, values_width = keys.size("linear_num_key_heads") * key, heads * value
    mixed = 2 * keys_width + values_width
    position = width * (mixed + values_width + 2 * heads) + values_width * width
    position += keys.size("linear_conv_kernel_dim") * mixed
    # Products: keys with keys and queries, weights with values; the state: two reads, one write.
    chunk = DELTA_CHUNK * heads * (DELTA_CHUNK * (2 * key + value) + 3 * key * value)
    return position, chunk


def _mlp_multiplications(keys: ConfigKeys, width: int, layers: int) -> int:
    """Return the number of multiplications for one position in the MLPs of all layers."""
    experts = keys.find_size("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    inner = keys.find_size("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
    inner = _mlp_width(keys, 4 * width if inner is None else inner)
    gated = width * _num_mlp_products(keys)
    if not experts:
        keys.find("num_experts_per_tok", "moe_intermediate_size", "shared_intermediate_size", "num_shared_experts")
        return layers * gated * inner
    sparse = _num_expert_layers(keys, layers)
    active = keys.size(
        "num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token", "top_k_experts", "experts_per_token"
    )
    expert = keys.find_size("moe_intermediate_size", "expert_ffn_hidden_size") or inner
    per_layer = width * experts + active * gated * expert
    if (alone := keys.find_size("shared_expert_intermediate_size")) is not None:
        per_layer += gated * alone + (width if alone else 0)  # and the gate before it
    elif (shared := keys.find_size("shared_intermediate_size")) is not None:
        per_layer += gated * shared
    else:
        num_shared = keys.find_size("n_shared_experts", "num_shared_experts", "moe_num_shared_experts") or 0
        per_layer += num_shared * gated * expert
    return sparse * per_layer + (layers - sparse) * gated * inner


def _mlp_width(keys: ConfigKeys, inner: int) -> int:
    """Return the inner width of MLPs, reduced and rounded if the config has keys for this."""
    cut, factor = keys.find("block_auto_adjust_ff_dim"), keys.find("block_ffn_dim_multiplier")
    multiple = keys.find_size("block_multiple_of") or 1
    if not cut:
        return inner
    inner = int(2 * inner / 3)
    return inner if factor is None else -(-int(factor * inner) // multiple) * multiple


def _num_mlp_products(keys: ConfigKeys) -> int:
    """Return the number of weight matrices of an MLP: two, or three with a gate."""
    if (products := keys.find_size("mlp_products")) is not None:
        return products
    activation = keys.find("hidden_activation", "hidden_act", "activation_function", "mlp_hidden_act")
    return 2 if activation in _UNGATED else 3


def _num_expert_layers(keys: ConfigKeys, layers: int) -> int:
    """Return the number of layers with experts."""
    named, places, frequency = keys.find("mlp_layer_types"), keys.find("moe_layers"), keys.find("moe_layer_freq")
    step = keys.find_size("decoder_sparse_step", "moe_layer_interval", "interleave_moe_layer_step") or 1
    dense = keys.find_size("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index") or 0
    last, without = keys.find("moe_layer_end_index"), set(keys.find("mlp_only_layers") or ())
    if named is not None:
        return sum(name == "sparse" for name in named)
    if places is not None:
        return len(places)
    if isinstance(frequency, Sequence):
        return sum(map(bool, frequency))
    end = layers if last in (None, -1) else int(last) + 1
    return sum(dense <= number < end and not (number + 1) % step and number not in without for number in range(layers))
