"""
Models of well under a million parameters, with real patch sizes and random weights, made without a
network.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import ByteLevelBPETokenizer

SPECIAL_TOKENS = (
    *(f"<|{name}|>" for name in ("endoftext", "im_start", "im_end")),
    *(f"<|{kind}_{end}|>" for kind in ("object_ref", "box", "quad", "vision") for end in ("start", "end")),
    *(f"<|{kind}_pad|>" for kind in ("vision", "image", "video")),
)
"""Special tokens of the Qwen family, in the order of their ids."""

MODEL_TYPES = ("qwen2_5_vl", "qwen3_vl", "qwen2", "qwen3")

_VOCABULARY = 512

_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
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
        folder: Output folder, created if missing.
        model_type: One of `MODEL_TYPES`.
        text: Texts from which the tokenizer's vocabulary is learned.
        seed: Seed of the weights.
        vocabulary: Maximum number of the tokenizer's tokens, without special tokens.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = learn_tokenizer(text, vocabulary=vocabulary)
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}
    # The weights come from one generator, which is put back afterwards: a caller's draws do not
    # change.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _build_model(model_type, len(tokenizer), ids)
    model.save_pretrained(folder)
    _build_processor(model_type, tokenizer).save_pretrained(folder)


def learn_tokenizer(
    text: Iterable[str],
    *,
    tokens: Sequence[str] = SPECIAL_TOKENS,
    eos_token: str = "<|im_end|>",  # noqa: S107  # a token of text
    pad_token: str = "<|endoftext|>",  # noqa: S107  # a token of text
    named: Mapping[str, str] | None = None,
    vocabulary: int = _VOCABULARY,
) -> Any:
    """
    Return a tokenizer of Qwen's kind, whose vocabulary is learned from texts.

    Args:
        text: Texts from which the vocabulary is learned.
        tokens: Special tokens.
        eos_token: Special token that ends a turn.
        pad_token: Special token of padding.
        named: Attribute of the tokenizer, such as `image_token` -> its special token.
        vocabulary: Maximum number of tokens that are learned.
    """
    learner = ByteLevelBPETokenizer()
    learner.train_from_iterator(text, vocab_size=vocabulary, min_frequency=2, show_progress=False)
    learned = json.loads(learner.to_str())["model"]
    merges = [tuple(merge) if isinstance(merge, list) else tuple(merge.split(" ")) for merge in learned["merges"]]
    tokenizer = transformers.Qwen2Tokenizer(
        vocab=learned["vocab"],
        merges=merges,
        eos_token=eos_token,
        pad_token=pad_token,
        **({"extra_special_tokens": dict(named)} if named else {}),
    )
    tokenizer.add_special_tokens({"additional_special_tokens": list(tokens)})
    tokenizer.chat_template = _CHAT_TEMPLATE
    return tokenizer


def _build_processor(model_type: str, tokenizer: Any) -> Any:
    if model_type == "qwen2_5_vl":
        kind, video_kind, patch_size = transformers.Qwen2_5_VLProcessor, transformers.Qwen2VLVideoProcessor, 14
    elif model_type == "qwen3_vl":
        kind, video_kind, patch_size = transformers.Qwen3VLProcessor, transformers.Qwen3VLVideoProcessor, 16
    else:
        return tokenizer
    images = transformers.Qwen2VLImageProcessor(patch_size=patch_size, merge_size=2)
    videos = video_kind(patch_size=patch_size, merge_size=2)
    return kind(images, tokenizer, videos, chat_template=_CHAT_TEMPLATE)


def _build_model(model_type: str, size: int, ids: dict[str, int]) -> Any:
    """Return a model with random weights, whose vocabulary has *size* tokens."""
    text: dict[str, Any] = {
        "vocab_size": size,
        **_TEXT,
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
    }
    if model_type.startswith("qwen3"):
        text["head_dim"] = 16
    if model_type == "qwen2":
        return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**text))
    if model_type == "qwen3":
        return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**text))
    media = {f"{name}_token_id": ids[f"<|{name}|>"] for name in ("vision_start", "vision_end")}
    media |= {f"{name}_token_id": ids[f"<|{name}_pad|>"] for name in ("image", "video")}
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
    if model_type == "qwen2_5_vl":
        rope |= {"type": "default", "mrope_section": [2, 3, 3]}
        vision = {**_VISION, "patch_size": 14, "fullatt_block_indexes": [1], "window_size": 56}
        config, model = transformers.Qwen2_5_VLConfig, transformers.Qwen2_5_VLForConditionalGeneration
    else:
        rope |= {"mrope_section": [4, 2, 2], "mrope_interleaved": True}
        vision = {**_VISION, "patch_size": 16, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 256}
        config, model = transformers.Qwen3VLConfig, transformers.Qwen3VLForConditionalGeneration
    text["rope_parameters"] = rope
    return model(config(text_config=text, vision_config=vision, tie_word_embeddings=False, **media))
