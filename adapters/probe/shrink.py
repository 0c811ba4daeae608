"""
Small copy of a model's configuration: layers keep their kinds and their order, but sizes shrink.

Rules depend on the names of keys, not on the model family. Windows, chunks, blocks and the lengths
at which rotary factors change become shorter than the probe's samples, so that the samples reach
each mechanism. A number that no rule covers, but that may be a length, is made smaller by trial if
the model still runs. A number that cannot shrink, and is not a size of weights, may be a distance
that the probe's samples do not reach. The model is then refused, since samples may influence each
other at this distance. The message names the key.
"""

import copy
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs

LONGEST = 70
"""Number of tokens of the probe's longest sample."""

HIDDEN, HEADS, HEAD = 64, 4, 16
"""Width of the small model, number of its attention heads, and size of each head."""

_INNER = 2 * HIDDEN
"""Inner width of layers that carry a state."""

_WINDOW, _CHUNK, _BLOCK, _ROPE = 24, 16, 8, 48
"""Number of tokens of a window, a chunk, a block and the original rotary context in the copy."""

FIRST_ID, VOCABULARY = 16, 96
"""First id of ordinary tokens, and the size of the vocabulary; the probe uses no special tokens."""

_MAX_LAYERS = 16

_LAYER_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks", "depth", "num_layers_per_stack")

_HEAD_KEYS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads")

_PERIOD_KEYS = re.compile(r"(_period|_interval|_pattern|_every_n_layers|_layer_step|_sparse_step)$")

_FIRST_LAYER_KEYS = re.compile(r"^(first_k_dense_replace|num_dense_layers|moe_layer_start_index|num_hash_layers)$")


_SHORT = (8, 16, 32)
"""
Numbers of tokens to try for a setting that may be a length. The smallest number that the model
accepts is used.
"""

_REACHED = LONGEST // 2
"""Limit above which a number may be a length that the probe's samples do not reach."""

_NO_SIZES = (
    "token_id", "label", "rope", "theta", "freq", "seed", "suppress", "inference", "quantization", "dtype", "version",
)  # fmt: skip
"""Parts of the names of keys whose numbers are not sizes, or are shrunk by `shrink_config`."""


@attrs.frozen
class _ConfigFacts:
    """Facts about the configuration that the rules need."""

    config: Mapping[str, Any]
    layers: int
    """Number of layers of the model."""

    kept: int
    """Number of layers of the copy, which are the first layers of the model."""

    fewest: int
    """
    Number of kept layers. For a configuration without layers, this is the smallest number that one
    of its parts keeps.
    """

    head: int
    """Size of the copy's attention heads."""

    @property
    def has_dynamic_rope(self) -> bool:
        """Whether rotary factors depend on the row's longest position."""
        rope = self.config.get("rope_parameters") or self.config.get("rope_scaling") or {}
        return "dynamic" in (rope.get("rope_type"), rope.get("type"))


_Rule = Callable[[Any, _ConfigFacts], Any]


def _at_most(most: int) -> _Rule:
    """Return a rule that limits a count to *most*; 0 stays 0."""
    return lambda value, _: min(value, most)


def _exactly(size: float) -> _Rule:
    return lambda value, _: size if value else value


def _shrink_key_heads(value: int, context: _ConfigFacts) -> int:
    """
    Return the copy's number of key heads, which keeps the model's relation to query heads: one key
    head, fewer than query heads, or equally many.
    """
    heads = next((context.config[name] for name in _HEAD_KEYS if context.config.get(name)), value)
    return 1 if value == 1 else HEADS if value >= heads else HEADS // 2


def _shrink_heads(_: int, context: _ConfigFacts) -> int:
    has_states = "state_size" in context.config or "expand" in context.config
    return _INNER // HEAD if has_states and "head_dim" in context.config else HEADS


_RULES: tuple[tuple[str, _Rule], ...] = (
    (r"vocab_size(_per_layer_input)?", _exactly(VOCABULARY)),
    ("|".join(_LAYER_KEYS), lambda _, c: c.kept),
    (r"((out|router)_)?hidden_size|n_embd|d_model|embed(ding)?_dim|word_embed_proj_dim|lru_width", _exactly(HIDDEN)),
    (r"attention_hidden_size", lambda v, c: HIDDEN * max(1, round(v / c.config.get("hidden_size", v)))),
    ("|".join(_HEAD_KEYS), _shrink_heads),
    (r"(encoder|decoder|swa_num)_attention_heads", _exactly(HEADS)),
    (r"(encoder|decoder)_layers", _at_most(2)),
    (r"num_key_value_heads|num_kv_heads|num_query_groups", _shrink_key_heads),
    (r"swa_num_key_value_heads", _exactly(HEADS // 2)),
    (r"head_dim", lambda v, c: HEAD // 2 if v == c.config.get("qk_rope_head_dim") else c.head),
    (r"qk_rope_head_dim|rotary_dim", _exactly(HEAD // 2)),
    (r"(qk_nope|v|index)_head_dim|query_pre_attn_scalar|hidden_size_per_layer_input", _exactly(HEAD)),
    (r"qk_head_dim", _exactly(HEAD + HEAD // 2)),
    (r"kv_lora_rank|q_lora_rank|o_lora_rank|gated_norm_rank|laurel_rank|adapter_rank|d_rel", _exactly(HEAD)),
    # With few heads, scores of zero tie, and the position in the row breaks ties.
    (r"index_n_heads", _at_most(32)),
    (r".*intermediate_size(_mlp)?|ffn_dim|.*ffn_hidden_size|dim_ff|dff|n_inner", _exactly(HIDDEN)),
    (r"attn_logit_softcapping|attention_logits_soft_cap", _exactly(2.0)),
    # Experts.
    (r"num_experts|n_routed_experts|num_local_experts|moe_num_experts|num_routed_experts", _at_most(4)),
    (r"num_experts_per_tok(en)?|moe_topk|moe_k|n_group|num_expert_group", _at_most(2)),
    (r"topk_group", _at_most(1)),
    # State-carrying layers.
    (r"mamba_n_heads|mamba_num_heads", _exactly(_INNER // HEAD)),
    (r"mamba_d_head|mamba_head_?dim", _exactly(HEAD)),
    (r"mamba_d_ssm", _exactly(_INNER)),
    (r"linear_num_key_heads|linear_num_heads", _exactly(2)),
    (r"linear_num_value_heads", lambda v, c: 2 * max(1, min(2, v // c.config["linear_num_key_heads"]))),
    (r"linear_key_head_dim|linear_value_head_dim|linear_head_dim", _exactly(HEAD)),
    # Lengths that have to be shorter than a sample.
    # A tower's windows are counted in pixels; its patches keep their size.
    (r"window_size", lambda v, c: v if "patch_size" in c.config else _WINDOW),
    (r"sliding_window(_size)?|attention_(window|chunk)_size|local_attention|keep_window_size", _exactly(_WINDOW)),
    (r"floor_scale|rel_extent|position_bias_max_distance", _exactly(_WINDOW)),
    (r"(mamba_)?chunk_size|block_size", _exactly(_CHUNK)),
    (r"index_topk|index_block_size", _exactly(_BLOCK)),
    (r"index_topk_blocks", _at_most(2)),
    (
        r"compress_rates?",
        lambda v, _: {name: min(rate, _BLOCK) for name, rate in v.items()} if isinstance(v, dict) else v,
    ),
    (r"original_max_position_embeddings", _exactly(_ROPE)),
    (
        r"(max_position_embeddings|n_positions|n_ctx|max_seq_len|model_max_length|context_length)",
        lambda _, c: _ROPE if c.has_dynamic_rope else 512,
    ),
    (r"num_kv_shared_layers", _at_most(1)),
    (r"max_window_layers", lambda v, c: min(v, c.kept)),
    # Index of a layer that something follows: an existing layer that is not the last.
    (r"(.+_)?layer_(id|idx|index)", lambda v, c: min(v, max(0, c.fewest - 2))),
)

_COMPILED = tuple((re.compile(pattern), rule) for pattern, rule in _RULES)


def shrink_config(config: Mapping[str, Any], layers_per_kind: int = 1) -> dict[str, Any]:
    """
    Return a small copy of a configuration, in the form of `to_dict`, including its parts (text,
    vision).

    Args:
        config: Configuration to shrink.
        layers_per_kind: Number of layers of each kind to keep, if the model has so many.
    """
    layers, after = _count_layers(config, layers_per_kind)
    parts = [one for key, one in config.items() if key.endswith("_config") and isinstance(one, Mapping)]
    fewest = after or min(filter(None, (_count_layers(one, layers_per_kind)[1] for one in parts)), default=0)
    context = _ConfigFacts(config, layers, after, fewest, _small_head_size(config))
    small: dict[str, Any] = {}
    special = itertools.count()
    for key, value in config.items():
        if value is not None and key.endswith(("_token_id", "image_token_index", "video_token_index")):
            small[key] = next(special)
        elif key in {"rope_parameters", "rope_scaling"}:
            small[key] = _shrink_rope(value, context)
        elif key == "per_layer_config" and isinstance(value, Mapping):
            kept = {place: part for place, part in value.items() if int(place) < context.kept}
            small[key] = {
                place: {name: _shrink_value(name, one, context) for name, one in part.items()}
                for place, part in kept.items()
            }
        elif isinstance(value, Mapping) and key.endswith("config") and not key.startswith("quantization"):
            small[key] = shrink_config(value, layers_per_kind)
        else:
            small[key] = _shrink_value(key, value, context)
    return small


def _count_layers(config: Mapping[str, Any], layers_per_kind: int) -> tuple[int, int]:
    """
    Return the number of layers of a part, and the number to keep; both are 0 if the part has only
    sub-parts.
    """
    layers = next((config[name] for name in _LAYER_KEYS if isinstance(config.get(name), int)), 0)
    return layers, min(layers, _count_kept_layers(config, layers, layers_per_kind))


def _shrink_value(key: str, value: Any, context: _ConfigFacts) -> Any:
    if isinstance(value, (list, tuple)):
        return _shrink_list(key, value, context)
    if value is None or isinstance(value, (bool, str)):
        return value
    for pattern, rule in _COMPILED:
        if pattern.fullmatch(key):
            return rule(value, context)
    return value


def _shrink_list(key: str, value: Sequence[Any], context: _ConfigFacts) -> list[Any]:
    """
    If a list has one entry for each layer, or has layer indices, return only the entries for kept
    layers. Return other lists unchanged.
    """
    items = list(value)
    if len(items) == context.layers and context.layers:
        return [
            _shrink_value(key, item, context) if not isinstance(item, (list, tuple)) else item
            for item in items[: context.kept]
        ]
    whole = all(isinstance(item, int) and not isinstance(item, bool) for item in items)
    if whole and re.search(r"(indices|indexes|idxs?|_ids|_layers)$", key):
        return [item for item in items if item < context.kept]
    return items


def _count_kept_layers(config: Mapping[str, Any], layers: int, layers_per_kind: int) -> int:
    """
    Return the number of first layers to keep, from 2 to `_MAX_LAYERS`. These include
    *layers_per_kind* layers of each kind if possible.
    """
    kept = 2
    shared = 1 if config.get("num_kv_shared_layers") else 0
    for key, value in config.items():
        if isinstance(value, (list, tuple)) and len(value) == layers and not key.endswith("_ids"):
            kinds = [str(item) for item in value]
            places = ([place for place, one in enumerate(kinds) if one == kind] for kind in set(kinds))
            kept = max(kept, *(found[:layers_per_kind][-1] + 1 for found in places))
        elif isinstance(value, (list, tuple)) and re.search(r"(indices|indexes|idxs?|_layer_ids|_layers)$", key):
            kept = max(kept, *(item + 1 for item in value[:1] if isinstance(item, int)), 0)
        elif isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            continue
        elif _PERIOD_KEYS.search(key) and value < layers:
            kept = max(kept, value)
        elif _FIRST_LAYER_KEYS.search(key) and value < layers:
            kept = max(kept, value + 1)
    return min(kept + shared, _MAX_LAYERS)


def _small_head_size(config: Mapping[str, Any]) -> int:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    is_split = "mrope_section" in rope and _rotary_share(config, rope) < 1 and config.get("head_dim")
    return 2 * HEAD if is_split else HEAD


def _rotary_share(config: Mapping[str, Any], rope: Mapping[str, Any]) -> float:
    return float(rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0)


def _shrink_rope(rope: Any, context: _ConfigFacts) -> Any:
    """Shrink rotary parameters, which are set once or for each kind of layer."""
    if not isinstance(rope, Mapping):
        return rope
    if any(isinstance(value, Mapping) for value in rope.values()):
        return {kind: _shrink_rope(value, context) for kind, value in rope.items()}
    size = context.head if not context.config.get("qk_rope_head_dim") else HEAD // 2
    half = int(size * _rotary_share(context.config, rope)) // 2
    small = dict(rope)
    for name in ("long_factor", "short_factor"):
        if isinstance(rope.get(name), (list, tuple)):
            small[name] = list(rope[name])[:half]
    if rope.get("mrope_section"):
        small["mrope_section"] = _shrink_sections(rope["mrope_section"], half)
    if rope.get("original_max_position_embeddings") or rope.get("rope_type", rope.get("type")) in (
        "dynamic",
        "longrope",
    ):
        small["original_max_position_embeddings"] = _ROPE
    return small


def _shrink_sections(sections: Sequence[int], half: int) -> list[int]:
    """Divide *half* frequencies in proportion to the sections; each section gets at least one."""
    total = sum(sections)
    small = [max(1, section * half // total) for section in sections]
    small[0] += half - sum(small)
    return small


KeyPath = tuple[str | int, ...]
"""Keys, and indices of lists, that lead to a value of a configuration."""

NewValues = Mapping[KeyPath, int]
"""Key path -> new value of the configuration of a small copy."""


def possible_lengths(small: Mapping[str, Any], *, text: str | None) -> dict[KeyPath, int]:
    """
    Return the key path and value of each number that may be a length and that no rule shrinks.

    For example, such a number may be the length of an attention window.

    Args:
        small: Result of `shrink_config`.
        text: Key of the text model's configuration; None if *small* has no parts.
    """
    part = small if text is None else small[text]
    return dict(_walk_possible_lengths(part, () if text is None else (text,)))


def _walk_possible_lengths(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, int]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            is_part = isinstance(item, Mapping) and "model_type" in item
            is_known = any(pattern.fullmatch(str(key)) for pattern, _ in _COMPILED)
            if not is_part and not is_known and not any(word in str(key) for word in _NO_SIZES):
                yield from _walk_possible_lengths(item, (*path, key))
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from _walk_possible_lengths(item, (*path, number))
    elif isinstance(value, int) and not isinstance(value, bool) and value > _REACHED:
        yield path, value


def shrink_by_trial(paths: Sequence[KeyPath], runs: Callable[[NewValues], bool]) -> tuple[NewValues, list[KeyPath]]:
    """
    Return smaller values with which the model still runs, and paths whose values cannot shrink.

    Both are empty if the model does not run even with its values unchanged.

    Args:
        paths: Key paths of numbers that may be lengths in tokens, such as windows.
        runs: Function that tests whether a small copy with new values can be built and can compute
            a sample.
    """
    together = dict.fromkeys(paths, _SHORT[0])
    if not paths or runs(together):
        return together, []
    if not runs({}):  # these numbers are not the cause
        return {}, []
    found: dict[KeyPath, int] = {}
    left = []
    for path in paths:
        short = next((size for size in _SHORT if runs({**found, path: size})), None)
        if short is None:
            left.append(path)
        else:
            found[path] = short
    return found, left


def replace_values(small: Mapping[str, Any], new_values: NewValues) -> dict[str, Any]:
    """Return a copy of a configuration in which *new_values* replace the values at their paths."""
    changed = copy.deepcopy(dict(small))
    for (*parts, last), size in new_values.items():
        part: Any = changed
        for key in parts:
            part = part[key]
        part[last] = size
    return changed


def key_path_text(path: KeyPath, value: int) -> str:
    """Return the keys of a path and its value, as text for a message."""
    return f"{'.'.join(str(key) for key in path if not isinstance(key, int))} ({value:,})"
