"""The images that a data file names: found one by one or all compared with their folders' listings, and decoded."""

from __future__ import annotations

import io
import os
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from PIL import Image, UnidentifiedImageError

from subtoken_train.datasets.known_files import absent
from subtoken_train.documents import check_regular
from subtoken_train.errors import SubTokenWarning, UncutError, shell_words
from subtoken_train.families.images import PixelError, rgb_pixels

SUFFIXES = (".jpg", ".png", ".gif", ".jpeg")
"""Under which an image may lie: OCR-VQA's are named ``.jpg`` in LLaVA's records, but its own download program saves
some as ``.gif`` or ``.png``."""
PICTURE_SUFFIXES = (".jpg", ".jpeg", ".png", ".gif", ".bmp", ".webp", ".tif", ".tiff", ".ppm", ".avif", ".jp2")
"""By which a name is taken for an image's."""
MAX_PIXELS = 89_478_485
"""Width times height of the largest image that is opened unless a setting says more (Pillow's own first limit)."""
MOST_PIXELS = 2 * MAX_PIXELS
"""Pillow opens no larger one."""
MAX_SCANS = 64
"""Scans of a JPEG: encoders write a dozen; each costs a pass over the whole picture, and an empty one a few bytes."""
MAX_EXIF = 1000
"""Pieces of a JPEG's EXIF: for each, Pillow copies all that came before."""
_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd8\xff]", re.DOTALL)
"""A marker of a JPEG that ends or leads a stretch: no byte of what is encoded, and no place to begin again at."""
_SCAN, _END = b"\xff\xda", b"\xff\xd9"
_FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "MPO", "PNG", "PPM", "TIFF", "WEBP")
"""Pillow's readers that are used; its reader of EPS would call another program."""


@dataclass(frozen=True)
class EncodedImage:
    """An image that is no file of its own: a cell of a table, a line of a text file.

    Attributes:
        read: its encoded bytes (PNG, JPEG, ...), read when they are asked for, so that no data set is held in memory.
        place: file and row, for messages.
    """

    read: Callable[[], bytes]
    place: str


ImageSource = Path | EncodedImage


@dataclass(frozen=True)
class FolderImages:
    """Holds what there is of the images of one folder.

    Attributes:
        folder: relative to the image folder.
        named: images that the records name in it, each counted once, and the folder itself where it is a video.
        missing: those that are not there, relative to the image folder; a folder without a frame ends with a slash.
        renamed: images that are there under another of ``SUFFIXES``.
        is_video: whether the records name the folder, as a video's frames.
    """

    folder: str
    named: int
    missing: list[str]
    renamed: int
    is_video: bool = False


def inside(folder: Path, name: str, outside: bool = False) -> Path:
    """Join ``folder / name``, which must lie in the folder once ``..`` and links (also ``find_image``'s) are followed.

    Args:
        folder: where names start; it may itself be a link.
        name: from a file that somebody else wrote.
        outside: whether it may lead out all the same.
    """
    path = folder / name
    if not outside:
        root, place = os.path.realpath(folder), os.path.realpath(find_image(path))
        if os.path.commonpath([root, place]) != root:
            raise ValueError(
                f"image {name[:120]!r} lies outside of {folder} (an absolute path, '..' or a link); name a folder that "
                "holds all images, or allow it with images_outside_folder: true"
            )
    return path


def find_image(path: Path) -> Path:
    """Return ``path``, or where there is no such file the same name with another of ``SUFFIXES``, if that is there."""
    if os.path.exists(path):  # unlike Path.exists: false where a name is too long, which opening it says
        return path
    return next((other for other in map(path.with_suffix, SUFFIXES) if os.path.exists(other)), path)


def compare_images(names: Iterable[str], image_folder: Path, outside: bool = False) -> list[FolderImages]:
    """Say what of the named images is there, folder by folder: one listing each, no look at single files.

    Args:
        names: paths below ``image_folder``, each once; one that ends with a slash is a folder of frames.
        image_folder: where they start.
        outside: whether their folders may lie elsewhere, see ``inside``; links of files are found when they are opened.
    """
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
    is_video = "" in names
    images = [name for name in names if name]
    absent = [name for name in images if name not in present]
    parts = map(os.path.splitext, present) if absent else ()
    stems = {stem for stem, suffix in parts if suffix in SUFFIXES}
    missing = [name for name in absent if os.path.splitext(name)[0] not in stems]
    paths = [f"{folder}/{name}" if folder else name for name in missing]
    if is_video and not any(name.lower().endswith(SUFFIXES) for name in present):
        paths.append(f"{folder}/")
    return FolderImages(folder, len(names), paths, len(absent) - len(missing), is_video)


def count_named(folders: Sequence[FolderImages]) -> str:
    """Return how many images and folders of frames are named, in words."""
    videos = sum(folder.is_video for folder in folders)
    images = sum(folder.named for folder in folders) - videos
    parts = [f"{images:,} images"] if images or not videos else []
    return " and ".join([*parts, *([f"{videos:,} videos"] if videos else [])])


def missing_images(folders: Sequence[FolderImages], data_file: Path, image_folder: Path) -> ValueError | None:
    """Return the error for missing images: how many, the first, and the command that lists them; None for none."""
    missing = [name for folder in folders for name in folder.missing]
    if not missing:
        return None
    videos = sum(name.endswith("/") for name in missing)
    counts = (
        (f"{len(missing) - videos:,} of {sum(x.named - x.is_video for x in folders):,} images", len(missing) - videos),
        (f"{videos:,} of {sum(x.is_video for x in folders):,} videos (folders of frames)", videos),
    )
    found = " and ".join(words for words, count in counts if count)
    command = f"subtoken-train data images {shell_words('--file', data_file, '--root', image_folder)}"
    return UncutError(
        f"{found} that {data_file} names are missing below {image_folder} (first: "
        f"{missing[0][:100]}); list them: {command}"
    )


def open_image(source: ImageSource, record_id: str | None = None, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Read one image, of a record or alone, by ``rgb_pixels``; of a missing file, what ``find_image`` takes for it.

    Args:
        source: a file or encoded bytes.
        record_id: of the record that names it, for messages.
        max_pixels: width times height that is decoded at most.
    """
    of_record = "" if record_id is None else f"record {record_id[:80]!r}: "
    place = source.place if isinstance(source, EncodedImage) else source
    whole = "send another" if isinstance(source, EncodedImage) else "replace the file"
    hint = "replace the file or drop the record" if of_record else whole
    try:
        if isinstance(source, EncodedImage):
            content: io.BytesIO | Path = io.BytesIO(source.read())
        else:
            content = find_image(source)
            check_regular(content)
        return _decoded(content, max_pixels, f"{of_record}image {place}")
    except FileNotFoundError:
        if not of_record:
            raise absent("image", place) from None
        hint = "check image_folder, or fetch the images the data set lists"
        raise ValueError(f"{of_record}image {place} does not exist; {hint}") from None
    except Exception as error:  # Pillow's readers raise many kinds for broken files
        text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        if isinstance(error, UnidentifiedImageError) and isinstance(source, EncodedImage):
            text = "no image of a kind that is read here"  # Pillow's words name the object in memory
        words = " ".join(text.split())[:160] or type(error).__name__
        raise ValueError(f"{of_record}image {place} cannot be read ({words}); {hint}") from None


def _decoded(content: io.BytesIO | Path, max_pixels: int, name: str) -> Image.Image:
    _check_exif(content)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of size: our own limit is asked next; of damage that it can read past
        warnings.simplefilter("default", SubTokenWarning)
        try:
            with Image.open(content, formats=_readers()) as image:
                width, height = image.size
                if width * height <= max_pixels:
                    _check_scans(image)
                    return rgb_pixels(image, name)
        except (OSError, SyntaxError, Image.DecompressionBombError, PixelError):
            raise
        except Exception as error:  # numbers that are none, and whatever else its readers trip over
            raise ValueError("it is damaged") from error
    raise ValueError(f"it has {width:,} x {height:,} pixels, at most {max_pixels:,} are read")


def _check_exif(content: io.BytesIO | Path) -> None:
    """Raise ``PixelError`` for a JPEG whose EXIF is in very many pieces."""
    with content.open("rb") if isinstance(content, Path) else nullcontext(content) as file:
        pieces = file.read().count(b"Exif\0\0") if file.read(2) == b"\xff\xd8" else 0
        file.seek(0)
    if pieces > MAX_EXIF:
        raise PixelError(f"its EXIF is in {pieces:,} pieces, at most {MAX_EXIF:,} are read")


def _check_scans(image: Image.Image) -> None:
    """Raise ``PixelError`` where a JPEG, or one of those that a TIFF holds, is written over and over."""
    coding = str(image.info.get("compression")) if image.format == "TIFF" else str(image.format)
    if coding.lower() not in ("jpeg", "mpo", "tiff_jpeg"):
        return
    file: Any = image.fp  # type: ignore[attr-defined]
    place = file.tell()
    file.seek(0)
    content = file.read()
    file.seek(place)
    stretches = [content]
    if coding == "jpeg":  # each strip or tile of a TIFF is one
        tags: Any = image.tag_v2  # type: ignore[attr-defined]
        begins, sizes = (tags.get(strips) or tags.get(tiles) or () for strips, tiles in ((273, 324), (279, 325)))
        if len(begins) != len(sizes) or 0 in sizes or sum(sizes) > len(content):
            raise PixelError("its strips share what they are read from, or do not say how long they are")
        stretches = [content[begin : begin + size] for begin, size in zip(begins, sizes, strict=True)]
    if (scans := max(map(_scans, stretches), default=0)) > MAX_SCANS:
        raise PixelError(f"it is written in {scans:,} scans, at most {MAX_SCANS} are read")


def _scans(content: bytes) -> int:
    """Return how many scans a decoder of JPEG would go through: those before its end, and none of a thumbnail."""
    count, found = 0, _MARKER.search(content, 2)
    while found and found[0] != _END:
        count += found[0] == _SCAN
        found = _MARKER.search(content, found.end() + int.from_bytes(content[found.end() : found.end() + 2]))
    return count


@cache
def _readers() -> list[str]:
    Image.init()
    return [name for name in _FORMATS if name in Image.OPEN]
