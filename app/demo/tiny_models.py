"""
Models of well under a million parameters, with real patch sizes and random weights, made without a
network.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Tokenizer,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
"""Special tokens of the Qwen family, in its order."""

MODEL_TYPES = ("qwen2_5_vl", "qwen3_vl", "qwen2", "qwen3")

_VOCABULARY = 512

_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}

_VISION = {"depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64, "out_hidden_size": 64}


def write_model(
    folder: Path, model_type: str, text: Iterable[str], *, seed: int, vocabulary: int = _VOCABULARY
) -> None:
    """
    Write a model, its tokenizer and its processor to *folder*.

    Args:
        folder: Made if missing.
        model_type: One of `MODEL_TYPES`.
        text: Corpus of the tokenizer's vocabulary.
        seed: Decides the weights.
        vocabulary: Tokens of the tokenizer, at most, the special ones aside.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = learned_tokenizer(text, vocabulary=vocabulary)
    size = len(tokenizer)
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}
    # The weights come from one generator, which is put back afterwards: a caller's draws do not
    # change.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _BUILDERS[model_type](size, ids)
    model.save_pretrained(folder)
    processor = _processor(model_type, tokenizer)
    processor.save_pretrained(folder)


def learned_tokenizer(
    text: Iterable[str],
    *,
    tokens: Sequence[str] = SPECIAL_TOKENS,
    eos_token: str = "<|im_end|>",  # noqa: S107  # a token of text
    pad_token: str = "<|endoftext|>",  # noqa: S107  # a token of text
    named: Mapping[str, str] | None = None,
    vocabulary: int = _VOCABULARY,
) -> Any:
    """
    Return a tokenizer of Qwen's kind, whose vocabulary is learned from a text.

    Args:
        text: Corpus of its vocabulary.
        tokens: Special tokens.
        eos_token: The one that ends a turn.
        pad_token: The one that pads.
        named: Names of the tokenizer's own for some of them, as `image_token`.
        vocabulary: Tokens that are learned, at most.
    """
    learner = ByteLevelBPETokenizer()
    learner.train_from_iterator(text, vocab_size=vocabulary, min_frequency=2, show_progress=False)
    learned = json.loads(learner.to_str())["model"]
    merges = [tuple(merge) if isinstance(merge, list) else tuple(merge.split(" ")) for merge in learned["merges"]]
    tokenizer = Qwen2Tokenizer(
        vocab=learned["vocab"],
        merges=merges,
        eos_token=eos_token,
        pad_token=pad_token,
        **({"extra_special_tokens": dict(named)} if named else {}),
    )
    tokenizer.add_special_tokens({"additional_special_tokens": list(tokens)})
    tokenizer.chat_template = _CHAT_TEMPLATE
    return tokenizer


def _processor(model_type: str, tokenizer: Any) -> Any:
    if model_type == "qwen2_5_vl":
        return Qwen2_5_VLProcessor(
            Qwen2VLImageProcessor(patch_size=14, merge_size=2),
            tokenizer,
            Qwen2VLVideoProcessor(patch_size=14, merge_size=2),
            chat_template=_CHAT_TEMPLATE,
        )
    if model_type == "qwen3_vl":
        return Qwen3VLProcessor(
            Qwen2VLImageProcessor(patch_size=16, merge_size=2),
            tokenizer,
            Qwen3VLVideoProcessor(patch_size=16, merge_size=2),
            chat_template=_CHAT_TEMPLATE,
        )
    return tokenizer


def _token_ids(ids: dict[str, int]) -> dict[str, int]:
    return {
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
    }


def _media_ids(ids: dict[str, int]) -> dict[str, int]:
    return {
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
    }


def _qwen2(size: int, ids: dict[str, int]) -> Any:
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=size, **_TEXT, **_token_ids(ids)))


def _qwen3(size: int, ids: dict[str, int]) -> Any:
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=size, head_dim=16, **_TEXT, **_token_ids(ids)))


def _qwen2_5_vl(size: int, ids: dict[str, int]) -> Any:
    rope = {"rope_type": "default", "type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
    return Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(
            text_config={"vocab_size": size, **_TEXT, **_token_ids(ids), "rope_parameters": rope},
            vision_config={**_VISION, "patch_size": 14, "fullatt_block_indexes": [1], "window_size": 56},
            tie_word_embeddings=False,
            **_media_ids(ids),
        )
    )


def _qwen3_vl(size: int, ids: dict[str, int]) -> Any:
    rope = {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True, "rope_theta": 10000.0}
    vision = {**_VISION, "patch_size": 16, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 256}
    return Qwen3VLForConditionalGeneration(
        Qwen3VLConfig(
            text_config={"vocab_size": size, "head_dim": 16, **_TEXT, **_token_ids(ids), "rope_parameters": rope},
            vision_config=vision,
            tie_word_embeddings=False,
            **_media_ids(ids),
        )
    )


_BUILDERS = {"qwen2": _qwen2, "qwen3": _qwen3, "qwen2_5_vl": _qwen2_5_vl, "qwen3_vl": _qwen3_vl}
