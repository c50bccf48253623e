"""Videos of records: folders and lists of frames, how many are read, and what is refused."""

import json

import pytest
from PIL import Image

from subtoken_train.datasets.collate import Collator
from subtoken_train.datasets.datamodule import InstructionDataModule
from subtoken_train.datasets.image_sources import VideoSource, first_frame, open_picture, open_video
from subtoken_train.datasets.records import InstructionRecords
from subtoken_train.families.llava import LlavaFamily
from subtoken_train.reducers import build_reducer
from subtoken_train.types import Turn


def talk(*values):
    return [{"from": ("human", "gpt")[i % 2], "value": value} for i, value in enumerate(values)]


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


ONE = talk("<video> hi", "yes")


def test_frames_are_thinned_evenly_and_the_rate_with_them(tmp_path):
    source = VideoSource(frames(tmp_path / "v", 9), fps=3.0)
    whole, some = open_video(source), open_video(source, max_frames=3)
    assert (reds(whole), whole.fps) == (list(range(9)), 3.0)
    assert (reds(some), some.fps) == ([1, 4, 7], 1.0)
    listed = VideoSource(tuple(tmp_path / "v" / f"{n:03}.png" for n in (8, 0, 4)))
    assert reds(open_picture(listed)) == [8, 0, 4]
    assert first_frame(source).name == "000.png"
    assert first_frame(listed).name == "008.png"


def test_all_frames_together_are_bounded(tmp_path):
    source = VideoSource(frames(tmp_path / "v", 4))
    assert len(open_video(source, max_pixels=96).frames) == 4
    words = r"record 'one': 4 frames of 6 x 4 pixels, at most 95 are read of all together"
    with pytest.raises(ValueError, match=words):
        open_video(source, "one", max_pixels=95)
    records = InstructionRecords(write(tmp_path, ROWS[0]))
    with pytest.raises(ValueError, match="at most 95 are read"):
        Collator(None, 64, max_pixels=95)([records[0]])


def test_what_is_no_video_is_refused(tmp_path):
    (tmp_path / "a.mp4").write_bytes(b"x")
    empty = tmp_path / "empty"
    empty.mkdir()
    for path, words in (
        (tmp_path / "a.mp4", "is a video file, which is not decoded here; .*ffmpeg"),
        (empty, "has no frames; extract some: ffmpeg"),
        (tmp_path / "none", "has no frames"),
    ):
        with pytest.raises(ValueError, match=f"record 'x': .*{words}"):
            open_video(VideoSource(path), "x")
    sizes = frames(tmp_path / "sizes", 1)
    Image.new("RGB", (4, 6)).save(sizes / "b.png")
    with pytest.raises(ValueError, match=r"record 'x': the frames of a video have different sizes, 6 x 4 and 4 x 6"):
        open_video(VideoSource(sizes), "x")


def test_frames_stay_in_their_folder(tmp_path):
    Image.new("RGB", (6, 4)).save(tmp_path / "secret.png")
    folder = frames(tmp_path / "images" / "v", 1)
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    with pytest.raises(ValueError, match=r"image 'link.png' lies outside of"):
        open_video(VideoSource(folder))
    assert len(open_video(VideoSource(folder, outside=True)).frames) == 2
    path = tmp_path / "images" / "train.json"
    path.write_text(json.dumps([{"id": "x", "video": "../v", "conversations": ONE}]))
    with pytest.raises(ValueError, match=r"record 'x': image '../v' lies outside of"):
        InstructionRecords(path)[0]


def test_a_family_that_takes_none_says_so_before_anything_is_opened_and_in_a_batch(tiny_family, tmp_path):
    data = InstructionDataModule(str(write(tmp_path, *ROWS)))
    data.read()
    with pytest.raises(ValueError, match=r"record 'folder': llava takes images and no videos; give its frames as"):
        data.check_images(LlavaFamily, build_reducer("none"))
    frames(tmp_path / "v", 2)
    with pytest.raises(ValueError, match="record 'folder': llava takes images and no videos"):
        Collator(tiny_family, 512)([data.training_records[0]])
