"""Tiny models that see, with the processors that ms-swift's templates expect."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)
from transformers.models.got_ocr2.image_processing_got_ocr2 import GotOcr2ImageProcessor
from transformers.models.internvl.video_processing_internvl import InternVLVideoProcessor
from transformers.models.minicpmv4_6.image_processing_minicpmv4_6 import MiniCPMV4_6ImageProcessor
from transformers.models.minicpmv4_6.video_processing_minicpmv4_6 import MiniCPMV4_6VideoProcessor
from transformers.models.paddleocr_vl.image_processing_paddleocr_vl import PaddleOCRVLImageProcessor

from tools.demo.tiny_models import SPECIAL_TOKENS, learned_tokenizer

Sizes = dict[str, Any]

_TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}

_VISION = {"depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64, "out_hidden_size": 64}

_TOWER = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}

_QWEN_MEDIA = {
    "<|image_pad|>": ("image_token_id", ""),
    "<|video_pad|>": ("video_token_id", ""),
    "<|vision_start|>": ("vision_start_token_id", ""),
    "<|vision_end|>": ("vision_end_token_id", ""),
}

_TURNS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


@attrs.frozen
class VisionFamily:
    """A family of models that see, and a tiny one of it."""

    model_type: str
    """Name that transformers has for it."""

    swift: tuple[str, str]
    """ms-swift's model type and template."""

    config: Sizes
    """Configuration without the vocabulary's size and the ids of tokens."""

    processor: Callable[[Any], Any]
    """Makes the processor of a tokenizer."""

    media: Mapping[str, tuple[str, str]]
    """Special token -> the configuration's key of its id, and its name in the processor."""

    tokens: tuple[str, ...] = _TURNS
    """Further special tokens."""

    ends: tuple[str, str] = ("<|im_end|>", "<|endoftext|>")
    """Tokens that end a turn, and that pad."""

    around: Sizes | None = None
    """Other parts of the configuration, if *config* is that of the model's thinker."""

    needs: tuple[str, str] | None = None
    """Package that only its template imports, and the extra that installs it."""


def write_vision_model(folder: Path, name: str, text: Iterable[str], *, seed: int) -> None:
    """Write a model, its tokenizer and its processor to *folder*."""
    folder.mkdir(parents=True, exist_ok=True)
    family = VISION_FAMILIES[name]
    ends, pads = family.ends
    tokenizer = learned_tokenizer(
        text,
        tokens=[*dict.fromkeys([*family.tokens, *family.media])],
        eos_token=ends,
        pad_token=pads,
        named={name: token for token, (_, name) in family.media.items() if name},
    )
    ids = {key: tokenizer.convert_tokens_to_ids(token) for token, (key, _) in family.media.items() if key}
    special = {"eos_token_id": ends, "pad_token_id": pads, "bos_token_id": pads}
    own = {key: tokenizer.convert_tokens_to_ids(token) for key, token in special.items()}
    sizes = {**family.config, "text_config": {**family.config["text_config"], "vocab_size": len(tokenizer), **own}}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        _model_of(family, sizes | ids).save_pretrained(folder)
    if family.around is not None:
        torch.save({}, folder / "spk_dict.pt")  # voices, without which transformers loads no such model
    family.processor(tokenizer).save_pretrained(folder)


def _model_of(family: VisionFamily, sizes: Sizes) -> Any:
    """Return a model with random weights."""
    if family.around is None:
        config = AutoConfig.for_model(family.model_type, **sizes, tie_word_embeddings=False)
        return AutoModelForImageTextToText.from_config(config)
    config = AutoConfig.for_model(family.model_type, thinker_config=sizes, **family.around)
    return AutoModelForMultimodalLM.from_config(config)


def _processor(kind: Any, *, options: Sizes | None = None, **parts: Callable[[], Any]) -> Callable[[Any], Any]:
    """Return a function that makes the processor of a tokenizer."""

    def build(tokenizer: Any) -> Any:
        made = {name: make() for name, make in parts.items()}
        return kind(**made, tokenizer=tokenizer, chat_template=tokenizer.chat_template, **(options or {}))

    return build


def _mrope(*sections: int, **others: Any) -> Sizes:
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sections), **others}


_LINEAR = {
    **_TEXT,
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "rope_parameters": _mrope(2, 1, 1, mrope_interleaved=True, partial_rotary_factor=0.25),
}
"""A text model of Qwen3.5's kind: a layer of linear attention, and one of full attention."""

_MEL_BINS = 128
"""Frequencies of a sound, which the template's processor counts."""

_SPEECH = {
    "talker_config": {
        **_TEXT, "embedding_size": 64, "vocab_size": 8448, "rope_parameters": _mrope(2, 3, 3), "pad_token_id": 8292,
    },
    "token2wav_config": {
        "dit_config": {
            "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16, "ff_mult": 1,
            "emb_dim": 16, "mel_dim": 8, "num_embeds": 32, "enc_dim": 16, "enc_emb_dim": 16,
            "enc_channels": [16, 16, 16], "enc_kernel_sizes": [3, 3, 1], "enc_dilations": [1, 1, 1],
            "enc_attention_channels": 8, "enc_res2net_scale": 2, "enc_se_channels": 8,
        },
        "bigvgan_config": {
            "mel_dim": 8, "upsample_initial_channel": 16, "upsample_rates": [2], "upsample_kernel_sizes": [4],
            "resblock_kernel_sizes": [3], "resblock_dilation_sizes": [[1, 3, 5]],
        },
    },
}  # fmt: skip
"""Parts of a speaking model beside its thinker: tokens of speech, and their sound."""

_QWEN3_VISION = {**_VISION, "patch_size": 16, "num_position_embeddings": 256}

_TILE = {"height": 56, "width": 56}


def _qwen(
    model_type: str, kind: Any, *, text: Sizes, vision: Sizes, videos: Any = Qwen2VLVideoProcessor
) -> VisionFamily:
    """Return a family of Qwen."""
    sides = {"patch_size": vision["patch_size"], "merge_size": 2}
    return VisionFamily(
        model_type=model_type,
        swift=(model_type, model_type),
        config={"text_config": {**_TEXT, **text}, "vision_config": vision},
        processor=_processor(
            kind, image_processor=partial(Qwen2VLImageProcessor, **sides), video_processor=partial(videos, **sides)
        ),
        media=_QWEN_MEDIA,
        tokens=SPECIAL_TOKENS,
    )


_FAMILIES = {
    "internvl": VisionFamily(
        model_type="internvl",
        swift=("internvl", "internvl_hf"),
        config={
            "text_config": {"model_type": "qwen2", **_TEXT},
            "vision_config": {**_TOWER, "image_size": 56, "patch_size": 14},
            "image_seq_length": 4,
        },
        processor=_processor(
            transformers.InternVLProcessor,
            image_processor=partial(GotOcr2ImageProcessor, size=_TILE, crop_to_patches=True, max_patches=6),
            video_processor=partial(InternVLVideoProcessor, size=_TILE),
            options={"image_seq_length": 4},
        ),
        media={
            "<img>": ("", "start_image_token"),
            "</img>": ("", "end_image_token"),
            "<IMG_CONTEXT>": ("image_token_id", "context_image_token"),
            "<video>": ("", "video_token"),
        },
    ),
    "glm4v": VisionFamily(
        model_type="glm4v",
        swift=("glm4v", "glm4v"),
        config={
            "text_config": {**_TEXT, "rope_parameters": _mrope(2, 1, 1, partial_rotary_factor=0.5)},
            "vision_config": {**_VISION, "patch_size": 14, "image_size": 56},
        },
        processor=_processor(
            transformers.Glm4vProcessor,
            image_processor=transformers.Glm4vImageProcessor,
            video_processor=transformers.Glm4vVideoProcessor,
        ),
        media={
            "<|begin_of_image|>": ("image_start_token_id", ""),
            "<|end_of_image|>": ("image_end_token_id", ""),
            "<|begin_of_video|>": ("video_start_token_id", ""),
            "<|end_of_video|>": ("video_end_token_id", ""),
            "<|image|>": ("image_token_id", ""),
            "<|video|>": ("video_token_id", ""),
        },
        tokens=("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        ends=("<|user|>", "<|endoftext|>"),
    ),
    "qwen2_vl": _qwen(
        "qwen2_vl",
        transformers.Qwen2VLProcessor,
        text={"rope_parameters": _mrope(2, 3, 3)},
        vision={"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 14},
    ),
    "qwen3_vl_moe": attrs.evolve(
        _qwen(
            "qwen3_vl_moe",
            transformers.Qwen3VLProcessor,
            text={
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 32,
                "rope_parameters": _mrope(4, 2, 2, mrope_interleaved=True),
            },
            vision={**_QWEN3_VISION, "deepstack_visual_indexes": [0, 1]},
            videos=transformers.Qwen3VLVideoProcessor,
        ),
        swift=("qwen3_vl_moe", "qwen3_vl"),
    ),
    "qwen3_5": _qwen(
        "qwen3_5",
        transformers.Qwen3VLProcessor,
        text=_LINEAR,
        vision=_QWEN3_VISION,
        videos=transformers.Qwen3VLVideoProcessor,
    ),
    "minicpmv4_6": VisionFamily(
        model_type="minicpmv4_6",
        swift=("minicpmv4_6", "minicpmv4_6"),
        config={
            "text_config": {"model_type": "qwen3_5_text", **_LINEAR},
            "vision_config": {**_TOWER, "image_size": 112, "patch_size": 14},
            "insert_layer_id": 0,
            "image_size": 112,
        },
        processor=_processor(
            transformers.MiniCPMV4_6Processor,
            image_processor=partial(MiniCPMV4_6ImageProcessor, scale_resolution=112, max_slice_nums=4),
            video_processor=partial(MiniCPMV4_6VideoProcessor, scale_resolution=112),
        ),
        media={
            "<image>": ("", "image_start_token"),
            "</image>": ("", "image_end_token"),
            "<slice>": ("", "slice_start_token"),
            "</slice>": ("", "slice_end_token"),
            "<image_id>": ("", "image_id_start_token"),
            "</image_id>": ("", "image_id_end_token"),
            "<|image_pad|>": ("image_token_id", "image_token"),
            "<|video_pad|>": ("video_token_id", "video_token"),
        },
    ),
    "paddleocr_vl": VisionFamily(
        model_type="paddleocr_vl",
        swift=("paddleocr_vl", "paddle_ocr_1_5"),
        config={
            "text_config": {**_TEXT, "rope_parameters": _mrope(2, 3, 3)},
            "vision_config": {**_TOWER, "image_size": 56, "patch_size": 14},
        },
        processor=_processor(
            transformers.PaddleOCRVLProcessor,
            image_processor=partial(
                PaddleOCRVLImageProcessor, size={"shortest_edge": 56 * 56, "longest_edge": 280 * 280}
            ),
        ),
        media={
            "<|IMAGE_START|>": ("vision_start_token_id", ""),
            "<|IMAGE_END|>": ("vision_end_token_id", ""),
            "<|IMAGE_PLACEHOLDER|>": ("image_token_id", "image_token"),
            "<|video_pad|>": ("video_token_id", ""),
        },
        tokens=("<unk>", "<|begin_of_sentence|>", "<|end_of_sentence|>", "</s>"),
        ends=("</s>", "<unk>"),
    ),
    "qwen2_5_omni": VisionFamily(
        model_type="qwen2_5_omni",
        swift=("qwen2_5_omni", "qwen2_5_omni"),
        config={
            "text_config": {**_TEXT, "rope_parameters": _mrope(2, 3, 3)},
            "vision_config": {**_VISION, "patch_size": 14, "fullatt_block_indexes": [1]},
            "audio_config": {
                "num_mel_bins": _MEL_BINS, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32,
                "d_model": 32, "output_dim": 64,
            },
        },
        processor=_processor(
            transformers.Qwen2_5OmniProcessor,
            image_processor=partial(Qwen2VLImageProcessor, patch_size=14, merge_size=2),
            video_processor=partial(Qwen2VLVideoProcessor, patch_size=14, merge_size=2),
            feature_extractor=partial(transformers.WhisperFeatureExtractor, feature_size=_MEL_BINS),
        ),
        media={
            "<|AUDIO|>": ("audio_token_index", "audio_token"),
            "<|audio_bos|>": ("audio_start_token_id", "audio_bos_token"),
            "<|audio_eos|>": ("audio_end_token_id", "audio_eos_token"),
            "<|IMAGE|>": ("image_token_index", "image_token"),
            "<|VIDEO|>": ("video_token_index", "video_token"),
            "<|vision_bos|>": ("vision_start_token_id", "vision_bos_token"),
            "<|vision_eos|>": ("vision_end_token_id", "vision_eos_token"),
        },
        around=_SPEECH,
        needs=("qwen_omni_utils", "omni"),
    ),
    "qwen2_5_vl": _qwen(
        "qwen2_5_vl",
        transformers.Qwen2_5_VLProcessor,
        text={"rope_parameters": _mrope(2, 3, 3)},
        vision={**_VISION, "patch_size": 14, "fullatt_block_indexes": [1]},
    ),
    "qwen3_vl": _qwen(
        "qwen3_vl",
        transformers.Qwen3VLProcessor,
        text={"rope_parameters": _mrope(4, 2, 2, mrope_interleaved=True)},
        vision={**_QWEN3_VISION, "deepstack_visual_indexes": [0, 1]},
        videos=transformers.Qwen3VLVideoProcessor,
    ),
}  # fmt: skip


def _as_moe(family: VisionFamily, model_type: str, *swift: str, **sizes: Any) -> VisionFamily:
    """Return a family whose text model is one of experts."""
    experts = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, **sizes}
    config = {**family.config, "text_config": {**family.config["text_config"], **experts}}
    return attrs.evolve(family, model_type=model_type, swift=(swift[0], swift[1]), config=config)


VISION_FAMILIES = {
    **_FAMILIES,
    "qwen3_5_moe": _as_moe(
        _FAMILIES["qwen3_5"], "qwen3_5_moe", "qwen3_5_moe", "qwen3_5",
        num_experts=4, shared_expert_intermediate_size=32,
    ),
    "glm4v_moe": _as_moe(
        _FAMILIES["glm4v"], "glm4v_moe", "glm4v_moe", "glm4_5v",
        n_routed_experts=4, n_shared_experts=1, first_k_dense_replace=1, n_group=1, topk_group=1,
    ),
    "qvq": attrs.evolve(_FAMILIES["qwen2_vl"], swift=("qwen2_vl", "qvq")),
    "mimo_vl": attrs.evolve(_FAMILIES["qwen2_5_vl"], swift=("qwen2_5_vl", "mimo_vl")),
    "qwen3_8": attrs.evolve(_FAMILIES["qwen3_5"], swift=("qwen3_5", "qwen3_8")),
    "ovis_ocr2": attrs.evolve(_FAMILIES["qwen3_5"], swift=("ovis_ocr2", "ovis_ocr2")),
}  # fmt: skip
"""Name -> family; the last have the model of another, under another template."""
