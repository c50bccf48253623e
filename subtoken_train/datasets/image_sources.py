"""The images and videos that a data file names: found, compared with listings, decoded; videos are frames as files."""

import io
import os
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, UnidentifiedImageError

from subtoken_train.datasets.known_files import absent
from subtoken_train.documents import check_regular
from subtoken_train.errors import UncutError, at_place, refuse, shell_words
from subtoken_train.families.images import Picture, PixelError, Video, rgb_pixels

SUFFIXES = (".jpg", ".png", ".gif", ".jpeg")  # OCR-VQA: ``.jpg`` in LLaVA's records, ``.gif`` or ``.png`` on disk
PICTURE_SUFFIXES = (".jpg", ".jpeg", ".png", ".gif", ".bmp", ".webp", ".tif", ".tiff", ".ppm", ".avif", ".jp2")
"""By which a name is taken for an image's."""
VIDEO_SUFFIXES = (".avi", ".flv", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".webm", ".wmv")
MAX_PIXELS = 89_478_485  # of an image, width times height, unless a setting says more (Pillow's own first limit)
MOST_PIXELS = 2 * MAX_PIXELS  # Pillow opens no larger one
MAX_FRAMES, MOST_FRAMES = 32, 4096  # of a video that are opened unless a setting says more, and its bound
MAX_SCANS = 64  # of a JPEG: encoders write a dozen; each costs a pass over the whole picture
MAX_EXIF = 1000  # pieces of a JPEG's EXIF: for each, Pillow copies all that came before
_FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "MPO", "PNG", "PPM", "TIFF", "WEBP")  # EPS would call a program


@dataclass(frozen=True)
class EncodedImage:
    """An image that is no file of its own: ``read`` gives its encoded bytes; ``place``: file and row, for messages."""

    read: Callable[[], bytes]
    place: str


@dataclass(frozen=True)
class VideoSource:
    """Frames of a video as files."""

    frames: Path | tuple[Path, ...]  # a folder, whose images in the order of their names are frames, or files in order
    fps: float = 1.0  # frames a second, as they were taken from the video
    outside: bool = False  # whether links in the folder may lead out of it


ImageSource = Path | EncodedImage
PictureSource = ImageSource | VideoSource  # media that ``<image>`` of a record stands for


@dataclass(frozen=True)
class FolderImages:
    """Holds what there is of the images of one folder."""

    folder: str  # relative to the image folder, as all names
    named: int  # images that the records name in it, each counted once, and the folder itself where it is a video
    missing: list[str]  # those that are not there; a folder without a frame ends with a slash
    renamed: int  # images that are there under another of ``SUFFIXES``
    is_video: bool = False  # whether the records name the folder, as a video's frames


def inside(folder: Path, name: str, outside: bool = False) -> Path:
    """Join ``folder / name``, in the folder once ``..`` and links (``find_image``'s, too) are followed."""
    path = folder / name
    if not outside:
        root, place = os.path.realpath(folder), os.path.realpath(find_image(path))
        if os.path.commonpath([root, place]) != root:
            words = "name a folder of all images (image_folder), or allow it (images_outside_folder: true)"
            raise ValueError(f"image {name[:120]!r} lies outside of {folder}; {words}")
    return path


def find_image(path: Path) -> Path:
    """Return ``path``, or where there is no such file the same name with another of ``SUFFIXES``, if that is there."""
    if os.path.exists(path):  # unlike Path.exists: false where a name is too long, which opening it says
        return path
    return next((other for other in map(path.with_suffix, SUFFIXES) if os.path.exists(other)), path)


def compare_images(names: Iterable[str], image_folder: Path, outside: bool = False) -> list[FolderImages]:
    """Say what of named images (with a slash: folders of frames) is there, by one listing of each folder."""
    wanted: dict[str, list[str]] = defaultdict(list)
    for name in names:
        folder, _, own = name.rpartition("/")
        wanted["/" if name.startswith("/") and not folder else folder].append(own)
    for folder in wanted:
        inside(image_folder, folder, outside)
    return [_compare_folder(folder, wanted[folder], image_folder) for folder in sorted(wanted)]


def _compare_folder(folder: str, names: list[str], image_folder: Path) -> FolderImages:
    try:
        with os.scandir(image_folder / folder) as entries:
            present = {entry.name for entry in entries if not entry.is_dir(follow_symlinks=False)}
    except (FileNotFoundError, NotADirectoryError):
        present = set()
    not_there = [name for name in names if name and name not in present]
    stems = {stem for stem, suffix in map(os.path.splitext, present if not_there else ()) if suffix in SUFFIXES}
    missing = [name for name in not_there if os.path.splitext(name)[0] not in stems]
    paths, is_video = [f"{folder}/{name}" if folder else name for name in missing], "" in names
    paths += [f"{folder}/"] if is_video and not any(name.lower().endswith(SUFFIXES) for name in present) else []
    return FolderImages(folder, len(names), paths, len(not_there) - len(missing), is_video)


def count_named(folders: Sequence[FolderImages]) -> str:
    """Return how many images and folders of frames are named, in words."""
    videos = sum(folder.is_video for folder in folders)
    images = sum(folder.named for folder in folders) - videos
    words = (f"{images:,} images" if images or not videos else "", f"{videos:,} videos" if videos else "")
    return " and ".join(filter(None, words))


def missing_images(folders: Sequence[FolderImages], data_file: Path, image_folder: Path) -> ValueError | None:
    """Return the error for missing images: how many, the first, the command that lists them; None for none."""
    missing = [name for folder in folders for name in folder.missing]
    if not missing:
        return None
    videos, all_videos = sum(name.endswith("/") for name in missing), sum(x.is_video for x in folders)
    images, named = len(missing) - videos, sum(x.named for x in folders) - all_videos
    words = (
        f"{images:,} of {named:,} images" if images else "",
        f"{videos:,} of {all_videos:,} videos (folders of frames)" if videos else "",
    )
    command = f"subtoken-train data images {shell_words('--file', data_file, '--root', image_folder)}"
    lost, first = " and ".join(filter(None, words)), missing[0][:100]
    return UncutError(f"{lost} of {data_file} are missing below {image_folder} (first: {first}); list them: {command}")


def open_picture(
    source: PictureSource, record_id: str | None = None, max_pixels: int = MAX_PIXELS, max_frames: int = MAX_FRAMES
) -> Picture:
    """Open an image or a video."""
    if isinstance(source, VideoSource):
        return open_video(source, record_id, max_pixels, max_frames)
    return open_image(source, record_id, max_pixels)


def open_image(source: ImageSource, record_id: str | None = None, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Read one image by ``rgb_pixels`` (of a missing file, ``find_image``'s) of at most ``max_pixels`` in all."""
    of_record, encoded = _of_record(record_id), isinstance(source, EncodedImage)
    name = f"{of_record}image {source.place if isinstance(source, EncodedImage) else source}"
    hint = "replace the file or drop the record" if of_record else "send another" if encoded else "replace the file"
    try:
        if isinstance(source, EncodedImage):
            return _decoded(io.BytesIO(source.read()), max_pixels)
        refuse((not check_regular(path := find_image(source)), "it is empty"))
        return _decoded(path, max_pixels)
    except FileNotFoundError:
        if not of_record:
            raise absent("image", str(source)) from None
        raise ValueError(f"{name} does not exist; check image_folder, or fetch the images the data set lists") from None
    except Exception as error:  # Pillow's readers raise many kinds for broken files
        text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        if isinstance(error, UnidentifiedImageError) and encoded:
            text = "no image of a kind that is read here"  # Pillow's words name the object in memory
        words = " ".join(text.split())[:160] or type(error).__name__
        raise ValueError(f"{name} cannot be read ({words}); {hint}") from None


def _of_record(record_id: str | None) -> str:
    return "" if record_id is None else f"record {record_id[:80]!r}: "


def _decoded(content: io.BytesIO | Path, max_pixels: int) -> Image.Image:
    _check_jpeg(content)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of size: our own limit is asked next; of damage that it can read past
        try:
            Image.init()
            with Image.open(content, formats=[name for name in _FORMATS if name in Image.OPEN]) as image:
                width, height = image.size
                if width * height <= max_pixels:
                    if image.format == "TIFF" and "jpeg" in str(image.info.get("compression")):
                        raise PixelError("it is a TIFF of JPEGs, which is not read; save it as JPEG or PNG")
                    return rgb_pixels(image)
        except (OSError, SyntaxError, Image.DecompressionBombError, PixelError):
            raise
        except Exception as error:  # numbers that are none, and whatever else its readers trip over
            raise ValueError("it is damaged") from error
    raise ValueError(f"it has {width:,} x {height:,} pixels, at most {max_pixels:,} are read")


def _check_jpeg(content: io.BytesIO | Path) -> None:
    """Refuse a JPEG that is written over and over; a scan's mark is no part of what is encoded."""
    with content.open("rb") if isinstance(content, Path) else nullcontext(content) as file:
        data = file.read() if file.read(2) == b"\xff\xd8" else b""
        file.seek(0)
    for mark, what, most in ((b"\xff\xda", "scans", MAX_SCANS), (b"Exif\0\0", "pieces of EXIF", MAX_EXIF)):
        if (count := data.count(mark)) > most:
            raise PixelError(f"it has {count:,} {what}, at most {most:,} are read")


def open_video(
    source: VideoSource, record_id: str | None = None, max_pixels: int = MAX_PIXELS, max_frames: int = MAX_FRAMES
) -> Video:
    """Read a video's frames, ``max_pixels`` in all; of more than ``max_frames``, evenly spaced ones."""
    with at_place(_of_record(record_id)):
        names = frames_in(source.frames) if isinstance(source.frames, Path) else list(source.frames)
        taken = spaced(names, max_frames)
        if isinstance(source.frames, Path):
            taken = [inside(source.frames, path.name, source.outside) for path in taken]
        frames = [open_image(taken[0], None, max_pixels)]
        width, height = frames[0].size
        if len(taken) * width * height > max_pixels:
            raise ValueError(f"{len(taken)} frames of {width:,} x {height:,} pixels, at most {max_pixels:,} are read")
        frames += [open_image(path, None, max_pixels) for path in taken[1:]]
        return Video(frames, source.fps * len(taken) / len(names))


def frames_in(folder: Path) -> list[Path]:
    """Return the images of a folder by name."""
    if not folder.is_dir() and (problem := refuse_video_file(str(folder))):
        raise ValueError(problem)
    names = sorted(path for path in folder.glob("*") if path.suffix.lower() in SUFFIXES)
    refuse((not names, f"{folder} has no frames; extract some: ffmpeg -i VIDEO -vf fps=1 {folder}/%06d.jpg"))
    return names


def spaced(items: Sequence[Any], count: int) -> list[Any]:
    """Pick ``count`` items at the middles of as many equal parts of the list; all where there are fewer."""
    taken = min(count, len(items))
    return [items[(2 * part + 1) * len(items) // (2 * taken)] for part in range(taken)]


def refuse_video_file(name: str) -> str | None:
    """Return what to say to the name of a video's file; None for another name."""
    if (path := Path(name)).suffix.lower() not in VIDEO_SUFFIXES:
        return None
    folder, name = path.with_suffix(""), name[:120]
    command = f"mkdir {folder} && ffmpeg -i {name} -vf fps=1 {folder}/%06d.jpg"
    return f"video {name!r} is a video file, which is not decoded here; make a folder of frames: {command}"


def first_frame(source: PictureSource) -> ImageSource:
    """Return an image itself, or a video's first frame."""
    if not isinstance(source, VideoSource):
        return source
    return frames_in(source.frames)[0] if isinstance(source.frames, Path) else source.frames[0]
