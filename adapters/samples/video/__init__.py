"""
Videos of samples: what a file says of itself, what it costs in tokens, how its frames are read.
"""

from __future__ import annotations

from packplan.adapters.samples.video.facts import VideoFacts, frames_of, video_facts
from packplan.adapters.samples.video.lengths import FRAMES_OF_LAYER, VideoCost, VideoLengths
from packplan.adapters.samples.video.reading import (
    Sampling,
    prepare_videos,
    reads_videos,
    sampling_of,
    sees_videos_apart,
    unread_reason,
    why_no_reader,
)

__all__ = [
    "FRAMES_OF_LAYER",
    "Sampling",
    "VideoCost",
    "VideoFacts",
    "VideoLengths",
    "frames_of",
    "prepare_videos",
    "reads_videos",
    "sampling_of",
    "sees_videos_apart",
    "unread_reason",
    "video_facts",
    "why_no_reader",
]
