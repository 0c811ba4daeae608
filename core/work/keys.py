"""Reader of a model's config.json that records which keys were read."""

import math
import re
from collections.abc import Mapping
from typing import Any

from packplan.core.errors import ArgumentError, ModelError

Sizes = Mapping[str, Any]

PRODUCT = 2
"""FLOPs of one multiplication and the addition of its result."""

ATTENTION_PRODUCTS = 2
"""
Number of multiplications per pair of tokens and unit of width: query with key, and attention weight
with value.
"""

_IS_SIZE = re.compile(
    r"(size|size_mlp|expert|expert_num|dim|dims|rank|ranks|heads?|layers?|experts|kernel|expand|width|window|inner|types?|pattern|interval|step|"
    r"blocks|streams|groups|head_sharing|multiplier|freq|period|offset|codebooks|topk|cache)(_\w*per_\w+)?$"
)
"""Endings of key names; the value of such a key may change the work."""

_HARMLESS = re.compile(
    r"(rope_|rotary|mrope|yarn|router_|moe_router|initializer|max_|quant|torch|chunk_size_feed_forward|_token|num_labels|"
    r"problem|encoder_no_repeat|model_type|transformers|dtype|tokenizer|cache_|use_|layer_scale|norm|attention_multiplier|"
    r"embedding_multiplier|residual_multiplier|logits_|topk_method|topk_group|n_group|group_expert|num_nextn|scor"
    r"|routed_scaling|output_|seed|partial|position_embedding_type|layerdrop|bos_|eos_|pad_|mup_|lm_head_multiplier"
    r"|key_multiplier|attention_(in|out)_multiplier|ssm_(in|out)_multiplier|pretraining_tp|num_experts_to|hidden_act"
    r"|ep_size|mtp_|num_mtp|clip|is_|attn_type|experts_implementation|type_vocab|tie_|query_pre_attn|init_)"
)
"""Prefixes of keys that look like sizes but do not change a matrix product."""


def as_sizes(config: Any) -> Sizes:
    """
    Return a config.json as a mapping, given its content or a configuration object of transformers.
    """
    sizes = config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(sizes, Mapping):
        message = f"config has to be the content of a config.json, or a model's config, not {type(config).__name__}"
        raise ArgumentError("argument", message)
    return sizes


class ConfigKeys:
    """
    Keys of a model's config.json, and a record of the keys that were read.

    >>> keys = ConfigKeys({"hidden_size": 8, "n_layer": 2, "num_streams": 4})
    >>> keys.size("hidden_size"), keys.size("num_hidden_layers", "n_layer"), keys.unread_sizes()
    (8, 2, ['num_streams'])
    """

    def __init__(self, sizes: Sizes, defaults: Sizes | None = None) -> None:
        """
        Look keys up in *sizes* first, then in *defaults*.

        Args:
            sizes: Content of a config.json, or a part of it.
            defaults: Values for keys that *sizes* does not have.
        """
        self._sizes = {**(defaults or {}), **{key: value for key, value in sizes.items() if value is not None}}
        self._read = set[str]()

    def find(self, *names: str) -> Any:
        """
        Return the value of the first key in *names* that exists, or None. All keys in *names* then
        count as read.
        """
        self._read.update(names)
        return next((self._sizes[name] for name in names if name in self._sizes), None)

    def find_size(self, *names: str) -> int | None:
        """
        Return the value of the first key in *names* that exists, as an integer; None if no key
        exists.

        Raises:
            ModelError: The value is not a finite number of at least 0.
        """
        found = self.find(*names)
        if found is None:
            return None
        if isinstance(found, bool) or not isinstance(found, (int, float)) or not 0 <= found < math.inf:
            text = str(found)[:40]
            reason = f"config.json has {names[0]} {text}, but the work of a sample needs a finite number of at least 0"
            raise ModelError("work", reason)
        return int(found)

    def size(self, *names: str) -> int:
        """
        Return the value of the first key in *names* that exists, as an integer. Raise a ModelError
        if no key exists.
        """
        found = self.find_size(*names)
        if found is None:
            raise ModelError("work", f"config.json has no {names[0]}, which the work of a sample depends on")
        return found

    def unread_sizes(self) -> list[str]:
        """
        Return the keys that look like sizes but were not read. Values of 0, booleans, texts and
        empty lists are ignored.
        """
        return sorted(
            key
            for key, value in self._sizes.items()
            if key not in self._read
            and _IS_SIZE.search(key)
            and not _HARMLESS.match(key)
            and not isinstance(value, (bool, str))
            and value not in (0, [], ())
        )
