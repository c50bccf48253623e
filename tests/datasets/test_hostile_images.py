"""Images and videos are data: paths stay in the folder, files are files, pixels are bounded, frames are thinned."""

import contextlib
import json
import os
import socket
from pathlib import Path

import pytest
from PIL import Image

from subtoken_train.datasets import image_sources as sources
from subtoken_train.datasets.collate import Collator
from subtoken_train.datasets.datamodule import InstructionDataModule
from subtoken_train.datasets.image_sources import EncodedImage, VideoSource, inside, open_image, open_video
from subtoken_train.datasets.records import InstructionRecords
from subtoken_train.families.llava import LlavaFamily
from subtoken_train.reducers import build_reducer
from subtoken_train.types import Turn
from tests.support.chats import talk
from tests.support.refusals import refuses
from tests.support.run_folders import encoded


@pytest.fixture
def folder(tmp_path) -> Path:
    """``images/a.png`` beside ``secret.png``."""
    (tmp_path / "images").mkdir()
    for place in ("images/a.png", "secret.png"):
        Image.new("RGB", (8, 8), (1, 2, 3)).save(tmp_path / place)
    return tmp_path


def data_file(folder: Path, name: str) -> Path:
    path = folder / "data.json"
    path.write_text(json.dumps([{"id": "one", "image": name, "conversations": talk("<image>\nWhat?", "Red.")}]))
    return path


@pytest.mark.parametrize("name", ["../secret.png", "/SECRET", "link.png", "link.jpg", "linked/secret.png"])
def test_paths_stay_in_the_image_folder(folder, name):
    images = folder / "images"
    (images / "link.png").symlink_to(folder / "secret.png")
    (images / "linked").symlink_to(folder)
    name = name.replace("/SECRET", str(folder / "secret.png"))
    path = data_file(folder, name)
    with pytest.raises(ValueError, match=r"record 'one': image .* lies outside of .*images_outside_folder: true"):
        InstructionRecords(path, images)[0]
    if not name.startswith("link."):
        refuses("lies outside of", lambda: InstructionRecords(path, images).compare_images())
    allowed = InstructionRecords(path, images, images_outside_folder=True)
    assert not allowed.compare_images()[0].missing
    assert open_image(allowed[0].images[0], "one").size == (8, 8)


def test_what_lies_in_the_folder_is_read_however_it_is_named(folder):
    (folder / "root").symlink_to(folder / "images")
    for images, name in ((folder / "root", "a.png"), (folder / "images", str(folder / "images" / "a.png"))):
        records = InstructionRecords(data_file(folder, name), images)
        assert not records.compare_images()[0].missing
        assert open_image(records[0].images[0]).size == (8, 8)
    assert inside(Path("/"), "etc/x") == Path("/etc/x")


ODD = [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")]


@pytest.mark.parametrize("make", [*ODD, lambda path: socket.socket(socket.AF_UNIX).bind(str(path))])
def test_only_files_are_images(folder, make, monkeypatch):
    monkeypatch.chdir(folder)
    make(Path("odd.png"))
    with pytest.raises(ValueError, match=r"record 'one': image odd.png cannot be read \(odd.png is not a regular file"):
        open_image(Path("odd.png"), "one")


@pytest.mark.slow
def test_pixels_are_bounded(folder):
    large = encoded(Image.new("RGB", (13_000, 13_000)))
    with pytest.raises(ValueError, match=r"record 'one': image row 3 .*13,000 x 13,000 pixels, at most 89,478,485"):
        open_image(EncodedImage(lambda: large, "row 3"), "one")
    Image.new("RGB", (40, 40)).save(folder / "images" / "a.png")
    records = InstructionRecords(data_file(folder, "a.png"), folder / "images")
    refuses(r"record 'one': image .*40 x 40 pixels, at most 1,000", Collator(None, 64, max_pixels=1000), [records[0]])


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP"])
def test_cut_and_flipped_files_are_worded(kind):
    refuses("cannot be read", open_image, EncodedImage(lambda: encoded(Image.new("RGB", (8, 8)), "EPS"), "row 1"))
    content = encoded(Image.new("RGB", (8, 8)), kind)
    assert open_image(EncodedImage(lambda: content, "whole")).mode == "RGB"
    for place in range(0, len(content), max(1, len(content) // 40)):
        for damaged in (content[:place], content[:place] + bytes([content[place] ^ 0x41]) + content[place + 1 :]):
            with contextlib.suppress(ValueError):  # anything else fails the test
                open_image(EncodedImage(lambda damaged=damaged: damaged, "row 1"), "one")


def repeated(scans):
    """A progressive JPEG whose last scan is written again, until there are so many."""
    whole = encoded(Image.new("RGB", (64, 48), "red"), "JPEG", progressive=True)
    last, end = whole.rindex(b"\xff\xda"), whole.rindex(b"\xff\xd9")
    return whole[:end] + whole[last:end] * (scans - whole.count(b"\xff\xda")) + whole[end:]


def test_a_jpeg_that_is_written_over_and_over(monkeypatch):
    assert open_image(EncodedImage(lambda: repeated(sources.MAX_SCANS), "a")).getpixel((0, 0))[0] > 250
    monkeypatch.setattr("subtoken_train.datasets.image_sources.rgb_pixels", lambda *given: pytest.fail("decoded"))
    with pytest.raises(ValueError, match="it has 65 scans, at most 64 are read"):
        open_image(EncodedImage(lambda: repeated(sources.MAX_SCANS + 1), "a"))
    inside = encoded(Image.new("RGB", (64, 48), "red"), "TIFF", compression="jpeg")
    with pytest.raises(ValueError, match="it is a TIFF of JPEGs, which is not read; save it as JPEG or PNG"):
        open_image(EncodedImage(lambda: inside, "a"))


def test_a_jpeg_whose_exif_is_in_pieces_has_a_bound(tmp_path):
    whole = repeated(1)
    for pieces in (sources.MAX_EXIF, sources.MAX_EXIF + 1):
        path = tmp_path / f"{pieces}.jpg"
        path.write_bytes(whole[:2] + b"\xff\xe1\x00\x09Exif\0\0x" * pieces + whole[2:])
        if pieces > sources.MAX_EXIF:
            refuses("it has 1,001 pieces of EXIF, at most 1,000 are read", open_image, path)
        else:
            assert open_image(path).size == (64, 48)


def frames(folder, count, size=(6, 4)):
    folder.mkdir(parents=True)
    for number in range(count):
        Image.new("RGB", size, (number, 0, 0)).save(folder / f"{number:03}.png")
    return folder


def write(folder, *rows):
    path = folder / "train.json"
    path.write_text(json.dumps(rows), encoding="utf-8")
    return path


def reds(video):
    return [frame.getpixel((0, 0))[0] for frame in video.frames]


LIST = ["f/1.png", "f/2.png"]
ROWS = [
    {"id": "folder", "video": "v", "fps": 2, "conversations": talk("<video>\nwhat ?", "a 7")},
    {"id": "list", "video": LIST, "conversations": talk("<image> what ?", "a 7")},
    {"id": "mixed", "image": "a.png", "video": [LIST, ["g.png"]], "conversations": talk("<video> <image><video>", "7")},
    {"id": "text", "conversations": talk("the tag <video>", "yes")},
]


def test_records_name_videos_in_the_order_of_their_marks(tmp_path):
    records = InstructionRecords(write(tmp_path, *ROWS))
    folder, listed, mixed, text = (records[i] for i in range(4))
    assert folder.images == [VideoSource(tmp_path / "v", 2.0)]
    assert folder.turns == [Turn("<image>\nwhat ?", "a 7")]
    two = tuple(tmp_path / name for name in LIST)
    assert listed.images == [VideoSource(two)]
    assert mixed.images == [VideoSource(two), tmp_path / "a.png", VideoSource((tmp_path / "g.png",))]
    assert mixed.turns[0].prompt == "<image> <image><image>"
    assert (text.images, text.turns[0].prompt) == ([], "the tag <video>")
    assert records.sizes().tolist() == [[1, 9], [1, 9], [3, 1], [0, 18]]
    assert (records.first_with(videos=True), records.first_with(videos=False)) == ("folder", "mixed")
    (tmp_path / "v").mkdir()
    missing = [name for each in records.compare_images() for name in each.missing]
    assert missing == ["a.png", "g.png", *LIST, "v/"]  # no frame is in it
    (tmp_path / "v/1.png").touch()
    missing = [name for each in records.compare_images() for name in each.missing]
    assert missing == ["a.png", "g.png", *LIST]


def test_frames_are_thinned_evenly_and_the_rate_with_them(tmp_path):
    source = VideoSource(frames(tmp_path / "v", 9), fps=3.0)
    whole, some = open_video(source), open_video(source, max_frames=3)
    assert (reds(whole), whole.fps) == (list(range(9)), 3.0)
    assert (reds(some), some.fps) == ([1, 4, 7], 1.0)
    listed = VideoSource(tuple(tmp_path / "v" / f"{n:03}.png" for n in (8, 0, 4)))
    assert reds(sources.open_picture(listed)) == [8, 0, 4]
    assert sources.first_frame(source).name == "000.png"
    assert sources.first_frame(listed).name == "008.png"


def test_all_frames_together_are_bounded(tmp_path):
    source = VideoSource(frames(tmp_path / "v", 4))
    assert len(open_video(source, max_pixels=96).frames) == 4
    refuses(r"record 'one': 4 frames of 6 x 4 pixels, at most 95 are read", open_video, source, "one", max_pixels=95)
    records = InstructionRecords(write(tmp_path, ROWS[0]))
    refuses("at most 95 are read", lambda: Collator(None, 64, max_pixels=95)([records[0]]))


def test_what_is_no_video_is_refused(tmp_path):
    (tmp_path / "a.mp4").write_bytes(b"x")
    empty = tmp_path / "empty"
    empty.mkdir()
    for path, words in (
        (tmp_path / "a.mp4", "is a video file, which is not decoded here; .*ffmpeg"),
        (empty, "has no frames; extract some: ffmpeg"),
        (tmp_path / "none", "has no frames"),
    ):
        refuses(f"record 'x': .*{words}", open_video, VideoSource(path), "x")
    sizes = frames(tmp_path / "sizes", 1)
    Image.new("RGB", (4, 6)).save(sizes / "b.png")
    with pytest.raises(ValueError, match=r"record 'x': the frames of a video have different sizes, 6 x 4 and 4 x 6"):
        open_video(VideoSource(sizes), "x")


def test_frames_stay_in_their_folder(tmp_path):
    Image.new("RGB", (6, 4)).save(tmp_path / "secret.png")
    folder = frames(tmp_path / "images" / "v", 1)
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    refuses(r"image 'link.png' lies outside of", lambda: open_video(VideoSource(folder)))
    assert len(open_video(VideoSource(folder, outside=True)).frames) == 2
    path = tmp_path / "images" / "train.json"
    path.write_text(json.dumps([{"id": "x", "video": "../v", "conversations": talk("<video> hi", "yes")}]))
    refuses(r"record 'x': image '../v' lies outside of", lambda: InstructionRecords(path)[0])


def test_a_family_that_takes_none_says_so_before_anything_is_opened_and_in_a_batch(tiny_family, tmp_path):
    data = InstructionDataModule(str(write(tmp_path, *ROWS)))
    data.read()
    with pytest.raises(ValueError, match=r"record 'folder': llava takes images and no videos; give its frames as"):
        data.check_images(LlavaFamily, build_reducer("none"))
    frames(tmp_path / "v", 2)
    refuses("record 'folder': llava takes images and no videos", Collator(tiny_family, 512), [data.training_records[0]])
