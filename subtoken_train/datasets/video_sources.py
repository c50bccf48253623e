"""The videos that a data file names, as folders or lists of frames; no file of a video is decoded.

``ffmpeg -i VIDEO.mp4 -vf fps=1 DIR/%06d.jpg`` makes a folder of frames.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from subtoken_train.datasets.image_sources import MAX_PIXELS, SUFFIXES, ImageSource, inside, open_image
from subtoken_train.families.images import Picture, Video

MAX_FRAMES = 32
"""Frames of a video that are opened unless a setting says more."""
MOST_FRAMES = 4096
"""Values of that setting."""
VIDEO_SUFFIXES = (".avi", ".flv", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".webm", ".wmv")


@dataclass(frozen=True)
class VideoSource:
    """Frames of a video as files.

    Attributes:
        frames: a folder, all of whose images are frames in the order of their names, or files in order.
        fps: frames a second, as they were taken from the video.
        outside: whether links in the folder may lead out of it.
    """

    frames: Path | tuple[Path, ...]
    fps: float = 1.0
    outside: bool = False


PictureSource = ImageSource | VideoSource
"""Media that ``<image>`` of a record stands for."""


def refuse_video_file(name: str) -> str | None:
    """Return what to say to the name of a video's file; None for another name."""
    path = Path(name)
    if path.suffix.lower() not in VIDEO_SUFFIXES:
        return None
    folder = path.with_suffix("")
    return (
        f"video {name[:120]!r} is a video file, which is not decoded here; make a folder of frames: mkdir {folder} && "
        f"ffmpeg -i {name[:120]} -vf fps=1 {folder}/%06d.jpg"
    )


def spaced(items: Sequence[Any], count: int) -> list[Any]:
    """Pick ``count`` items at the middles of as many equal parts of the list; all where there are fewer."""
    taken = min(count, len(items))
    return [items[(2 * part + 1) * len(items) // (2 * taken)] for part in range(taken)]


def frames_in(folder: Path) -> list[Path]:
    """Return the images of a folder by name."""
    if not folder.is_dir() and (problem := refuse_video_file(str(folder))):
        raise ValueError(problem)
    names = sorted(path for path in folder.glob("*") if path.suffix.lower() in SUFFIXES)
    if not names:
        raise ValueError(f"{folder} has no frames; extract some: ffmpeg -i VIDEO -vf fps=1 {folder}/%06d.jpg")
    return names


def evenly_spaced(folder: Path, count: int) -> list[Path]:
    """Pick ``count`` images of a folder, see ``spaced`` and ``frames_in``."""
    return spaced(frames_in(folder), count)


def open_video(
    source: VideoSource, record_id: str | None = None, max_pixels: int = MAX_PIXELS, max_frames: int = MAX_FRAMES
) -> Video:
    """Read the frames of a video, evenly spaced where there are more than ``max_frames``; ``fps`` becomes less then.

    Args:
        source: where they are.
        record_id: of the record that names them, for messages.
        max_pixels: width times height of all frames together that are decoded at most.
        max_frames: frames that are opened at most.
    """
    of_record = "" if record_id is None else f"record {record_id[:80]!r}: "
    try:
        names = frames_in(source.frames) if isinstance(source.frames, Path) else list(source.frames)
        taken = spaced(names, max_frames)
        if isinstance(source.frames, Path):
            taken = [inside(source.frames, path.name, source.outside) for path in taken]
    except ValueError as error:
        raise ValueError(f"{of_record}{error}") from None
    frames = [open_image(taken[0], record_id, max_pixels)]
    width, height = frames[0].size
    if len(taken) * width * height > max_pixels:
        raise ValueError(
            f"{of_record}{len(taken)} frames of {width:,} x {height:,} pixels, at most {max_pixels:,} are read of all "
            "together; use fewer frames, or make them smaller"
        )
    frames += [open_image(path, record_id, max_pixels) for path in taken[1:]]
    try:
        return Video(frames, source.fps * len(taken) / len(names))
    except ValueError as error:
        raise ValueError(f"{of_record}{error}") from None


def first_frame(source: PictureSource) -> ImageSource:
    """Return an image itself, or a video's first frame."""
    if not isinstance(source, VideoSource):
        return source
    return frames_in(source.frames)[0] if isinstance(source.frames, Path) else source.frames[0]


def open_picture(
    source: PictureSource, record_id: str | None = None, max_pixels: int = MAX_PIXELS, max_frames: int = MAX_FRAMES
) -> Picture:
    """Open an image or a video, see ``open_image`` and ``open_video``."""
    if isinstance(source, VideoSource):
        return open_video(source, record_id, max_pixels, max_frames)
    return open_image(source, record_id, max_pixels)
