"""Tiny models that see, with the processors that ms-swift's templates expect."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch
import transformers
from transformers import AutoModelForMultimodalLM, Qwen2VLImageProcessor, Qwen2VLVideoProcessor
from transformers.models.got_ocr2.image_processing_got_ocr2 import GotOcr2ImageProcessor
from transformers.models.internvl.video_processing_internvl import InternVLVideoProcessor
from transformers.models.minicpmv4_6.image_processing_minicpmv4_6 import MiniCPMV4_6ImageProcessor
from transformers.models.minicpmv4_6.video_processing_minicpmv4_6 import MiniCPMV4_6VideoProcessor
from transformers.models.paddleocr_vl.image_processing_paddleocr_vl import PaddleOCRVLImageProcessor

from packplan.adapters.probe.shrink import shrink_config
from tools.demo.tiny_models import SPECIAL_TOKENS, learn_tokenizer
from tools.families import default_config

Sizes = dict[str, Any]

_QWEN_MEDIA = {
    "<|image_pad|>": ("image_token_id", ""), "<|video_pad|>": ("video_token_id", ""),
    "<|vision_start|>": ("vision_start_token_id", ""), "<|vision_end|>": ("vision_end_token_id", ""),
}  # fmt: skip


@attrs.frozen
class VisionFamily:
    """A family of models that see, and a tiny one of it."""

    model_type: str
    """Name that transformers has for it."""

    swift: tuple[str, str]
    """ms-swift's model type and template."""

    processor: Callable[[Any], Any]
    """Makes the processor of a tokenizer."""

    media: Mapping[str, tuple[str, str]]
    """Special token -> the configuration's key of its id, and its name in the processor."""

    sizes: Sizes = attrs.field(factory=dict)
    """Sizes that differ from those of the probe's small copy, by part of the configuration."""

    tokens: tuple[str, ...] = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    """Further special tokens."""

    ends: tuple[str, str] = ("<|im_end|>", "<|endoftext|>")
    """Tokens that end a turn, and that pad."""

    needs: tuple[str, str] | None = None
    """Package that only its template imports, and the extra that installs it."""

    def config(self) -> Any:
        """Return the configuration of a tiny model, without its own ids of tokens."""
        default = default_config(self.model_type)
        config = type(default)(**_merge(shrink_config(default.to_dict()), self.sizes))
        text, config.tie_word_embeddings = config.get_text_config(), False
        text.max_position_embeddings, text.tie_word_embeddings = 32768, False
        return config


def _merge(sizes: Sizes, others: Sizes) -> Sizes:
    """Return sizes with others in their place, part by part."""
    return sizes | {key: _merge(sizes[key], one) if isinstance(one, dict) else one for key, one in others.items()}


def write_vision_model(folder: Path, name: str, text: Iterable[str], *, seed: int) -> None:
    """Write a model, its tokenizer and its processor to *folder*."""
    folder.mkdir(parents=True, exist_ok=True)
    family = VISION_FAMILIES[name]
    ends, pads = family.ends
    tokenizer = learn_tokenizer(
        text,
        tokens=[*dict.fromkeys([*family.tokens, *family.media])],
        eos_token=ends,
        pad_token=pads,
        named={name: token for token, (_, name) in family.media.items() if name},
    )
    config = family.config()
    owner, words = getattr(config, "thinker_config", config), config.get_text_config()
    words.vocab_size = len(tokenizer)
    own = [(words, "eos_token_id", ends), (words, "pad_token_id", pads), (words, "bos_token_id", pads)]
    for part, key, token in [*own, *((owner, key, token) for token, (key, _) in family.media.items() if key)]:
        setattr(part, key, tokenizer.convert_tokens_to_ids(token))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        AutoModelForMultimodalLM.from_config(config).save_pretrained(folder)
    if owner is not config:
        torch.save({}, folder / "spk_dict.pt")  # voices, without which transformers loads no such model
    family.processor(tokenizer).save_pretrained(folder)


def _processor(kind: Any, *, options: Sizes | None = None, **parts: Callable[[], Any]) -> Callable[[Any], Any]:
    """Return a function that makes the processor of a tokenizer."""

    def build(tokenizer: Any) -> Any:
        made = {name: make() for name, make in parts.items()}
        return kind(**made, tokenizer=tokenizer, chat_template=tokenizer.chat_template, **(options or {}))

    return build


def _mrope(*sections: int, **others: Any) -> Sizes:
    return {"rope_parameters": {"rope_theta": 10000.0, "mrope_section": list(sections), **others}}


_LINEAR = {
    "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "head_dim": 32,
    **_mrope(2, 1, 1, mrope_interleaved=True, partial_rotary_factor=0.25),
}  # fmt: skip
"""A text model of Qwen3.5's kind: a layer of linear attention, and one of full attention."""

_QWEN2_5 = {"depth": 2, "fullatt_block_indexes": [1]}

_QWEN3 = {
    "text_config": _mrope(4, 2, 2, mrope_interleaved=True),
    "vision_config": {"depth": 2, "deepstack_visual_indexes": [0, 1]},
}

_SPEECH = {
    "talker_config": {"embedding_size": 64, **_mrope(2, 3, 3)},
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

_TILE = {"height": 56, "width": 56}


def _qwen(kind: Any, name: str, *, videos: Any = Qwen2VLVideoProcessor, **sizes: Sizes) -> VisionFamily:
    """Return a family of Qwen."""
    sides = {"patch_size": 14 if videos is Qwen2VLVideoProcessor else 16, "merge_size": 2}
    return VisionFamily(
        model_type=name,
        swift=(name, name),
        processor=_processor(
            kind, image_processor=partial(Qwen2VLImageProcessor, **sides), video_processor=partial(videos, **sides)
        ),
        media=_QWEN_MEDIA,
        sizes=sizes,
        tokens=SPECIAL_TOKENS,
    )


_qwen3 = partial(_qwen, transformers.Qwen3VLProcessor, videos=transformers.Qwen3VLVideoProcessor)


_FAMILIES = {
    "internvl": VisionFamily(
        model_type="internvl",
        swift=("internvl", "internvl_hf"),
        sizes={"vision_config": {"image_size": [56, 56]}, "image_seq_length": 4},
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
        sizes={"vision_config": {"image_size": 56}},
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
    "qwen2_vl": _qwen(transformers.Qwen2VLProcessor, "qwen2_vl"),
    "qwen3_vl_moe": attrs.evolve(_qwen3("qwen3_vl_moe", **_QWEN3), swift=("qwen3_vl_moe", "qwen3_vl")),
    "qwen3_5": _qwen3("qwen3_5", text_config=_LINEAR),
    "minicpmv4_6": VisionFamily(
        model_type="minicpmv4_6",
        swift=("minicpmv4_6", "minicpmv4_6"),
        sizes={"text_config": _LINEAR, "vision_config": {"image_size": 112, "patch_size": 14}, "image_size": 112},
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
        sizes={"vision_config": {"image_size": 56}},
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
        sizes={
            "thinker_config": {
                "text_config": _mrope(2, 3, 3),
                "vision_config": _QWEN2_5,
                "audio_config": {"encoder_layers": 1, "encoder_ffn_dim": 32, "output_dim": 64},
            },
            **_SPEECH,
        },
        processor=_processor(
            transformers.Qwen2_5OmniProcessor,
            image_processor=partial(Qwen2VLImageProcessor, patch_size=14, merge_size=2),
            video_processor=partial(Qwen2VLVideoProcessor, patch_size=14, merge_size=2),
            feature_extractor=partial(transformers.WhisperFeatureExtractor, feature_size=128),
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
        needs=("qwen_omni_utils", "omni"),
    ),
    "qwen2_5_vl": _qwen(transformers.Qwen2_5_VLProcessor, "qwen2_5_vl", vision_config=_QWEN2_5),
    "qwen3_vl": _qwen3("qwen3_vl", **_QWEN3),
}


VISION_FAMILIES = {
    **_FAMILIES,
    **{
        name: attrs.evolve(_FAMILIES[of], model_type=model_type, swift=(model_type, template))
        for name, of, model_type, template in (
            ("qwen3_5_moe", "qwen3_5", "qwen3_5_moe", "qwen3_5"),
            ("glm4v_moe", "glm4v", "glm4v_moe", "glm4_5v"),
            ("qvq", "qwen2_vl", "qwen2_vl", "qvq"),
            ("mimo_vl", "qwen2_5_vl", "qwen2_5_vl", "mimo_vl"),
            ("qwen3_8", "qwen3_5", "qwen3_5", "qwen3_8"),
        )
    },
    "ovis_ocr2": attrs.evolve(_FAMILIES["qwen3_5"], swift=("ovis_ocr2", "ovis_ocr2")),
}
"""Name -> family; the last have the model of another, under another template."""
