"""
Chooses video frames as the YAML's section `template` says, and decodes them with qwen_vl_utils and
decord.

decord 0.6 fails on videos whose container rotates them by a quarter turn. Such videos are read with
PyAV, at the same frame indices. If qwen_vl_utils uses another reader, such as an installed
torchcodec, every video is decoded to measure it.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from qwen_vl_utils import vision_process
from swift.template import Template

from packplan.adapters.models import replace_attributes
from packplan.adapters.samples.media_files import open_video, quarter_turns
from packplan.core.config.run import TemplateConfig
from packplan.core.errors import ConfigError

READER = "decord"

Sampling = Mapping[str, Any]
"""Arguments of qwen_vl_utils' `fetch_video` that the run's section `template` sets, by name."""

_FINDS_ALL = "packplan plan verify --decode finds all such videos"

_SAMPLING = {
    "fps": "fps",
    "min_frames": "fps_min_frames",
    "max_frames": "fps_max_frames",
    "min_pixels": "video_min_pixels",
    "max_pixels": "video_max_pixels",
    "total_pixels": "video_total_pixels",
}
"""Key of the section `template` for each argument of `fetch_video`."""


def reads_videos(template: Template) -> bool:
    """Return whether a template reads videos with qwen_vl_utils, the only supported way."""
    return {"qwen_vl_utils", "fetch_video"} <= set(type(template).replace_tag.__code__.co_names)


def has_separate_video_pass(template: Template) -> bool:
    """Return whether the model's vision tower runs once for images and again for videos."""
    return reads_videos(template) and template.version == "v3"


def decord_fault() -> str | None:
    """
    Return a message if decord does not read the videos on this machine, else None.

    Another reader may find a different number of frames than the container states.
    """
    found = vision_process.get_video_reader_backend()
    if found == READER:
        return None
    if found == "torchvision":
        return "no reader of videos is installed: pip install 'packplan[video]'"
    return f"videos are read by {found}, not by {READER}"


def video_sampling(config: TemplateConfig) -> Sampling:
    """Return the sampling arguments for qwen_vl_utils that the run sets, by name."""
    named = {argument: getattr(config, key) for argument, key in _SAMPLING.items()}
    return {argument: value for argument, value in named.items() if value is not None}


def set_video_sampling(template: Template, config: TemplateConfig) -> None:
    """Make a template sample videos by the keys of *config*; ConfigError if that is impossible."""
    if not reads_videos(template):
        return
    if not hasattr(template.processor, "image_processor"):  # transformers takes the tokenizer alone for one
        reason = "has no image processor: copy processor_config.json or preprocessor_config.json into its folder"
        raise ConfigError.for_key("model.model", reason)
    sampling = video_sampling(config)
    _refuse_size_limits(template, sampling)
    template.replace_tag = partial(_replace_tag, template.replace_tag, sampling)
    vision_process.VIDEO_READER_BACKENDS[READER] = _read_video


def _refuse_size_limits(template: Template, sampling: Sampling) -> None:
    """Raise ConfigError if the smallest allowed frame size exceeds the largest."""
    token = (template.processor.image_processor.patch_size * vision_process.SPATIAL_MERGE_SIZE) ** 2
    least = sampling.get("min_pixels", vision_process.VIDEO_MIN_TOKEN_NUM * token)
    most = sampling.get("max_pixels", vision_process.VIDEO_MAX_TOKEN_NUM * token)
    if most < least:
        key, value = ("video_max_pixels", most) if "max_pixels" in sampling else ("video_min_pixels", least)
        reason = f"is {value:,}, but the minimum of {least:,} pixels a frame exceeds the maximum of {most:,}"
        raise ConfigError.for_key(f"template.{key}", f"{reason}: change video_min_pixels or video_max_pixels")


def _replace_tag(replace: Callable[..., Any], sampling: Sampling, media_type: str, index: int, inputs: Any) -> Any:
    """Call the template's *replace* for a media tag, with the run's sampling for a video."""
    if media_type != "video":
        return replace(media_type, index, inputs)
    # These arguments would change images too, so they are set for this call only. Listed frames are
    # played at FPS.
    with (
        replace_attributes(inputs, chat_template_kwargs={**inputs.chat_template_kwargs, **sampling}),
        replace_attributes(vision_process, FPS=sampling.get("fps", vision_process.FPS)),
    ):
        return replace(media_type, index, inputs)


def decode_fault(path: str, sampling: Sampling | None = None) -> str | None:
    """
    Decode frames of a video; return a message if that fails, else None.

    Args:
        path: Path of the video file.
        sampling: Sampling arguments of the frames to decode; None decodes all frames in order.
    """
    try:
        if sampling is None:
            _decode_all(path)
        else:
            _read_video({"video": path, **sampling})
    except Exception as error:  # noqa: BLE001  # decord's, FFmpeg's and memory's alike are the reason
        # decord's message begins with a place in its source, a time, and the check that failed.
        why = str(error).strip().splitlines()[0].rpartition("] ")[2].rpartition(") ")[2][-200:]
        return f"the video {path} cannot be decoded: {why}; encode it again, or remove its record ({_FINDS_ALL})"
    return None


def _decode_all(path: str) -> None:
    """Decode all frames of a video with training's reader, one frame in memory at a time."""
    import decord

    if quarter_turns(path) % 2:
        with open_video(path) as container:
            for _ in container.decode(container.streams.best("video")):
                pass
        return
    reader = decord.VideoReader(path, num_threads=1)
    for _ in range(len(reader)):
        reader.next()


def _read_video(element: dict[str, Any]) -> tuple[torch.Tensor, dict[str, Any], float]:
    """
    Return sampled frames, their metadata, and the number of sampled frames a second. The frames
    have the shape (frames, 3, height, width).
    """
    path = element["video"]
    if quarter_turns(path) % 2 == 0:
        read: tuple[torch.Tensor, dict[str, Any], float] = vision_process._read_video_decord(element)  # noqa: SLF001
        return read
    total, rate = _count_frames(path)
    number = vision_process.smart_nframes(element, total_frames=total, video_fps=rate)
    indices = torch.linspace(0, total - 1, number).round().long().tolist()
    frames = torch.from_numpy(_decode_frames(path, indices)).permute(0, 3, 1, 2)
    metadata = {"fps": rate, "frames_indices": indices, "total_num_frames": total, "video_backend": "pyav"}
    return frames, metadata, number / total * rate


def _count_frames(path: str) -> tuple[int, float]:
    """Return the number of frames in a video, and its frame rate in frames a second."""
    with open_video(path) as container:
        stream = container.streams.best("video")
        return sum(packet.size > 0 for packet in container.demux(stream)), float(stream.average_rate)


def _decode_frames(path: str, indices: list[int]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """
    Return the frames at ascending *indices*, rotated as a player shows them.

    The dtype is uint8, and the shape is (frames, height, width, 3).
    """
    kept = []
    with open_video(path) as container:
        wanted = iter(indices)
        next_one = next(wanted, None)
        for number, frame in enumerate(container.decode(container.streams.best("video"))):
            while number == next_one:
                kept.append(np.rot90(frame.to_ndarray(format="rgb24"), round(frame.rotation / 90) % 4))
                next_one = next(wanted, None)
            if next_one is None:
                return np.stack(kept)
    raise ValueError(f"it has fewer than {indices[-1] + 1:,} frames")
