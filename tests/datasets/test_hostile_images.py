"""Images are data: their paths stay in the folder, their files are files, their pixels are bounded."""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
import struct
from pathlib import Path

import pytest
from PIL import Image

from subtoken_train.datasets.collate import Collator
from subtoken_train.datasets.image_sources import MAX_EXIF, MAX_SCANS, EncodedImage, inside, open_image
from subtoken_train.datasets.records import InstructionRecords
from subtoken_train.errors import SubTokenWarning
from subtoken_train.evaluation.tasks import build_task


@pytest.fixture
def folder(tmp_path) -> Path:
    """``images/a.png`` beside ``secret.png``."""
    (tmp_path / "images").mkdir()
    for place in ("images/a.png", "secret.png"):
        Image.new("RGB", (8, 8), (1, 2, 3)).save(tmp_path / place)
    return tmp_path


def data_file(folder: Path, name: str) -> Path:
    turns = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "Red."}]
    path = folder / "data.json"
    path.write_text(json.dumps([{"id": "one", "image": name, "conversations": turns}]))
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
        with pytest.raises(ValueError, match="lies outside of"):
            InstructionRecords(path, images).compare_images()
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


def test_questions_of_ones_own_stay_in_their_folder(folder):
    line = {"image": "../secret.png", "question": "What?", "answers": ["red"], "metric": "exact_match"}
    (folder / "images" / "mine.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(ValueError, match="lies outside of"):
        build_task("local", folder / "images").samples()
    assert build_task("local", folder / "images", images_outside_folder=True).samples()[0].images


def fifo(path: Path) -> None:
    os.mkfifo(path)


def a_socket(path: Path) -> None:
    socket.socket(socket.AF_UNIX).bind(str(path))


@pytest.mark.parametrize("make", [fifo, Path.mkdir, lambda path: path.symlink_to("/dev/zero"), a_socket])
def test_only_files_are_images(folder, make, monkeypatch):
    monkeypatch.chdir(folder)
    make(Path("odd.png"))
    with pytest.raises(ValueError, match=r"record 'one': image odd.png cannot be read \(odd.png is not a regular file"):
        open_image(Path("odd.png"), "one")


def bytes_of(kind: str, size: tuple[int, int] = (8, 8)) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size).save(buffer, kind)
    return buffer.getvalue()


@pytest.mark.slow
def test_pixels_are_bounded(folder):
    large = bytes_of("PNG", (13_000, 13_000))
    with pytest.raises(ValueError, match=r"record 'one': image row 3 .*13,000 x 13,000 pixels, at most 89,478,485"):
        open_image(EncodedImage(lambda: large, "row 3"), "one")
    Image.new("RGB", (40, 40)).save(folder / "images" / "a.png")
    records = InstructionRecords(data_file(folder, "a.png"), folder / "images")
    with pytest.raises(ValueError, match=r"record 'one': image .*40 x 40 pixels, at most 1,000"):
        Collator(None, 64, max_pixels=1000)([records[0]])


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP"])
def test_cut_and_flipped_files_are_worded(kind):
    with pytest.raises(ValueError, match="cannot be read"):  # its reader would call a program
        open_image(EncodedImage(lambda: bytes_of("EPS"), "row 1"))
    content = bytes_of(kind)
    assert open_image(EncodedImage(lambda: content, "whole")).mode == "RGB"
    for place in range(0, len(content), max(1, len(content) // 40)):
        flipped = content[:place] + bytes([content[place] ^ 0x41]) + content[place + 1 :]
        for damaged in (content[:place], flipped):
            with contextlib.suppress(ValueError):  # anything else fails the test
                open_image(EncodedImage(lambda damaged=damaged: damaged, "row 1"), "one")


def repeated(scans, form="JPEG", **settings):
    """A progressive JPEG whose last scan is written again, until there are so many; in a TIFF, if that is asked."""
    content = io.BytesIO()
    Image.new("RGB", (64, 48), "red").save(content, "JPEG", progressive=True)
    whole = content.getvalue()
    last, end = whole.rindex(b"\xff\xda"), whole.rindex(b"\xff\xd9")
    made = whole[:end] + whole[last:end] * (scans - whole.count(b"\xff\xda")) + whole[end:]
    if form == "JPEG":
        return made
    tags = [(256, 64), (257, 48), (258, 8), (259, 7), (262, 6), (273, 8), (277, 3), (278, 48), (279, len(made))]
    tags = [(tag, settings.get(str(tag), value)) for tag, value in tags]
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    directory = struct.pack("<H", len(tags)) + entries + bytes(4)
    return b"II*\0" + struct.pack("<I", 8 + len(made)) + made + directory


@pytest.mark.parametrize("form", ["JPEG", "TIFF"])
def test_a_jpeg_that_is_written_over_and_over(form, monkeypatch):
    assert open_image(EncodedImage(lambda: repeated(MAX_SCANS, form), "a")).getpixel((0, 0))[0] > 250
    content = io.BytesIO()
    Image.new("RGB", (64, 48), "red").save(content, "JPEG", comment=b"\xff\xda" * 500)  # what is no scan does not count
    made = content.getvalue() + b"\xff\xda" * 500
    assert open_image(EncodedImage(lambda: made, "a")).size == (64, 48)
    monkeypatch.setattr("subtoken_train.datasets.image_sources.rgb_pixels", lambda *given: pytest.fail("decoded"))
    for scans in (MAX_SCANS + 1, 2000):
        with pytest.raises(ValueError, match=f"it is written in {scans:,} scans, at most 64 are read"):
            open_image(EncodedImage(lambda scans=scans: repeated(scans, form), "a"))
    if form == "TIFF":
        with pytest.raises(ValueError, match="its strips share what they are read from"):
            open_image(EncodedImage(lambda: repeated(20, form, **{"279": 10**6}), "a"))


def test_a_jpeg_whose_exif_is_in_pieces_has_a_bound(tmp_path):
    whole = repeated(1)
    piece = b"\xff\xe1\x00\x09Exif\0\0x"
    size = open_image(EncodedImage(lambda: whole, "b")).size
    for pieces in (MAX_EXIF, MAX_EXIF + 1, 500_000):
        path = tmp_path / f"{pieces}.jpg"
        path.write_bytes(whole[:2] + piece * pieces + whole[2:])
        for source in (EncodedImage(path.read_bytes, "a"), path):
            if pieces > MAX_EXIF:
                with pytest.raises(ValueError, match=f"its EXIF is in {pieces:,} pieces, at most 1,000 are read"):
                    open_image(source)
            else:
                with pytest.warns(SubTokenWarning, match="its EXIF is damaged"):
                    assert open_image(source).size == size
