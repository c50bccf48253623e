"""``subtoken-train generate``: the answer, its line of figures, the picture, and mistakes in one line."""

from __future__ import annotations

import io
import re

import pytest
from PIL import Image

from subtoken_train import SubTokenModel
from subtoken_train.cli.main import main
from tests.support.commands import printed, refused

LINE = re.compile(
    r"(\d+) tokens after (\d+) \| KV [\d,]+ of [\d,]+ bytes \([\d.]+%(?:, in int8)?\); compressed region ([\d.]+)% of "
    r"its KV \((?:[\d.]+% of its entries; before the eviction )?nominal ([\d.]+)%\); index [\d,]+, slack [\d,]+ bytes"
    r"(?: \| (.+))? \| prefill [\d.]+ s, decode [\d.]+ s"
)
TEXT = "the bee and the spider met in the garden. " * 12


@pytest.fixture(scope="module")
def picture(tmp_path_factory):
    path = tmp_path_factory.mktemp("image") / "a.png"
    Image.effect_noise((120, 80), 60).save(path)
    return str(path)


def lines(capsys, *argv):
    """Output lines of a call that must succeed."""
    return printed(capsys, "generate", *argv).rstrip("\n").split("\n")


@pytest.mark.slow
def test_the_answer_is_that_of_the_library_and_figures_follow(vlm_adapter, picture, capsys):
    answer, line = lines(
        capsys, "--adapter", vlm_adapter, "--image", picture, "--prompt", "is there a 0 ?", "--max-new-tokens", 6
    )
    expected = SubTokenModel.from_pretrained(vlm_adapter).chat(
        "is there a 0 ?", [Image.open(picture)], max_new_tokens=6, do_sample=False
    )
    assert answer.strip() == expected
    found = LINE.fullmatch(line)
    assert found is not None
    assert found[1] == "6"
    assert (found[3], found[4], found[5]) == ("15.6250", "15.6250", None)


def test_beams_sampling_and_eviction(vlm_adapter, picture, capsys, dummy_evictions):
    common = ["--adapter", vlm_adapter, "--image", picture, "--prompt", "hi", "--max-new-tokens", 4]
    assert LINE.fullmatch(lines(capsys, *common, "--num-beams", 2)[-1])
    assert LINE.fullmatch(lines(capsys, *common, "--temperature", 0.7)[-1])
    assert lines(capsys, *common, "--temperature", "1e-40")[0] == lines(capsys, *common)[0]  # greedy
    evicted = ["--eviction", "first_visual", "--eviction-keep", "0.5", "--eviction-option", "window=2"]
    line = lines(capsys, *common, *evicted, "--kv-dtype", "int8", "--device", "cpu")[-1]
    assert "%, in int8); compressed region 7.8125% of its KV (12.5% of its entries; before the eviction nominal" in line
    found = LINE.fullmatch(line)
    assert (found[3], found[4], found[5]) == ("7.8125", "15.6250", "first_visual 0.5 int8")


def test_a_backbone_alone_with_a_reducer(vlm_adapter, picture, capsys, dummy_evictions):
    reducer = ["--reducer", "fastv", "--keep-ratio", 0.25, "--eviction", "first", "--eviction-keep", "9tokens"]
    out = lines(capsys, "--backbone", vlm_adapter.parent / "backbone", "--image", picture, "--prompt", "hi", *reducer)
    found = LINE.fullmatch(out[-1])
    assert (found[4], found[5]) == ("25.0000", "first 9 tokens")


def test_long_prompts_come_from_stdin(text_adapter, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(TEXT + "\n"))
    found = LINE.fullmatch(lines(capsys, "--adapter", text_adapter, "--prompt", "-", "--context-length", 64)[-1])
    assert (found[3], found[4]) == ("31.2500", "31.2500")
    tokenizer = SubTokenModel.from_pretrained(text_adapter).tokenizer
    assert int(found[2]) == len(tokenizer(TEXT)["input_ids"])


class PanicException(BaseException):
    """As pyo3 names what Rust raises."""


def test_a_text_at_which_a_tokenizer_breaks_down_is_words(text_adapter, capsys, monkeypatch):
    words = "the prompt holds 1,000,000 blanks in a row, at which tokenizers break down; take them out"
    for blank in " \t\u3000":
        monkeypatch.setattr("sys.stdin", io.StringIO(blank * 1_100_000 + "x"))
        assert refused(capsys, "generate", "--adapter", text_adapter, "--prompt", "-") == words

    def panic(*given, **settings):
        raise PanicException("Onig: retry-limit-in-match over")

    monkeypatch.setattr("transformers.PreTrainedTokenizerFast.__call__", panic)
    words = "the tokenizer broke down at this text (Onig: retry-limit-in-match over); shorten it, or break up its runs"
    assert words in refused(capsys, "generate", "--adapter", text_adapter, "--prompt", "hi")


def test_short_texts_are_answered_whole(text_adapter, capsys):
    line = lines(capsys, "--adapter", text_adapter, "--prompt", "a bee")[-1]
    assert "; no visual token and no context to compress; index 0" in line


def test_show_draws_the_chosen_layers(vlm_adapter, picture, tmp_path, capsys):
    path = tmp_path / "new" / "out.png"
    argv = ["--adapter", vlm_adapter, "--image", picture, "--prompt", "hi", "--max-new-tokens", 2]
    out = lines(capsys, *argv, "--show", path, "--show-layers", "0,2")
    assert out[-1] == f"kept and dropped visual tokens of layers 0, 2 drawn in {path}"
    assert LINE.fullmatch(out[-2])
    width, height = Image.open(path).size
    assert width == 2 * (640 + 16)
    assert f"{path} exists; choose another --show" in refused(capsys, "generate", *argv, "--show", path)
    lines(capsys, *argv, "--show", tmp_path / "all.png")
    assert Image.open(tmp_path / "all.png").size == (3 * 656, height)


def test_a_forgotten_image_is_one_line_of_warning(vlm_adapter, text_adapter, capsys):
    argv = ["generate", "--prompt", "is there a 0 ?", "--max-new-tokens", "2", "--adapter"]
    assert main([*argv, str(vlm_adapter)]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("subtoken-train: warning: the prompt has no image, so llava answers from the text alone")
    assert main([*argv, str(text_adapter)]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--max-new-tokens", "0"], "--max-new-tokens 0 must be at least 1"),
        (["--num-beams", "0"], "--num-beams 0 must be at least 1"),
        (["--temperature", "-1"], "--temperature -1.0 must be 0 (greedy) or more"),
        (["--show-layers", "0"], "--show-layers needs --show FILE"),
        (["--show", "a.png"], "--show draws the visual tokens of one image, and 0 are given"),
        (["--show", "a.png", "--image", "a", "--image", "b"], "of one image, and 2 are given"),
        (["--show", "a.gif", "--image", "a"], "--show a.gif must end in .png"),
        (["--image", "nowhere.png"], "image nowhere.png does not exist; check the path"),
        (["--eviction-keep", "0.5"], "--eviction-keep, --eviction-every, --eviction-option and --scope need"),
        (["--eviction", "first"], "--eviction first needs --eviction-keep, for instance 0.1, 256tokens or 20MB"),
        (["--eviction", "frist", "--eviction-keep", "1"], "unknown eviction method 'frist'. Did you mean 'first'?"),
        (["--eviction", "first", "--eviction-keep", "a lot"], "'a lot' is not a budget; write a fraction (0.1)"),
        (["--eviction", "first", "--eviction-keep", ""], "'' is not a budget; write a fraction (0.1)"),
        (["--eviction", "first", "--eviction-keep", "1e400MB"], "'1e400MB' is not a budget; write a fraction (0.1)"),
        (["--eviction-keep", ""], "--eviction-keep, --eviction-every, --eviction-option and --scope need --eviction"),
        (["--eviction", "first", "--eviction-keep", "2"], "eviction_keep=2.0 must lie in (0, 1]"),
        (["--eviction", "first", "--eviction-keep", "0"], "eviction_keep=0.0 must lie in (0, 1]"),
        (["--prefill-chunk", "0"], "prefill_chunk=0 must be a whole number of at least 1"),
        (["--prefill-chunk", "few"], "argument --prefill-chunk: invalid int value: 'few'"),
        (["--rerotate"], "rerotate needs an eviction; use streaming_llm, snapkv or h2o"),
        (["--kv-dtype", "int3"], "unknown kv_dtype 'int3'. Did you mean"),
        (["--reducer", "fastv"], "--reducer and --keep-ratio go together"),
        (["--device", "cuda:99"], "unknown device of this machine 'cuda:99'"),
        (["--promt", "x"], "Did you mean '--prompt'?"),
    ],
)
def test_mistakes_that_need_no_model(capsys, dummy_evictions, vlm_adapter, argv, words):
    assert words in refused(capsys, "generate", "--adapter", vlm_adapter, "--prompt", "hi", *argv)


def test_there_must_be_a_model(capsys, tmp_path, vlm_adapter):
    assert "give --adapter DIR, or --backbone PATH" in refused(capsys, "generate", "--prompt", "hi")
    assert "not an adapter folder" in refused(capsys, "generate", "--adapter", tmp_path, "--prompt", "hi")
    assert "neither a folder with a config.json" in refused(
        capsys, "generate", "--backbone", tmp_path, "--prompt", "hi"
    )
    message = refused(
        capsys, "generate", "--adapter", vlm_adapter, "--prompt", "hi", "--reducer", "fastv", "--keep-ratio", 0.5
    )
    assert "is an adapter with its own token reducer" in message


def test_mistakes_that_the_vision_model_finds(capsys, dummy_evictions, vlm_adapter, picture, tmp_path):
    common = ["--adapter", vlm_adapter, "--image", picture, "--prompt"]
    corrupt = tmp_path / "corrupt.png"
    corrupt.write_bytes(b"\x89PNG\r\n\x1a\n nothing")
    assert f"image {corrupt} cannot be read" in refused(
        capsys, "generate", *common[:2], "--image", corrupt, "--prompt", "hi"
    )
    assert "2 image placeholders but 1 images" in refused(capsys, "generate", *common, "<image><image> hi")
    assert "the prompt is empty" in refused(capsys, "generate", *common, " ")
    assert "context_length is for language models" in refused(capsys, "generate", *common, "hi", "--context-length", 3)
    message = refused(capsys, "generate", *common, "hi", "--show", tmp_path / "a.png", "--show-layers", "0,3")
    assert "--show-layers 0,3: layers are numbers from 0 to 2, with commas between them" in message
    evicted = ["--eviction", "first_visual", "--eviction-keep"]
    assert re.search(
        r"too small for .*; it needs at least \d+ bytes", refused(capsys, "generate", *common, "hi", *evicted, "100B")
    )
    assert "'prompt 0' has no image" in refused(capsys, "generate", *common[:2], "--prompt", "hi", *evicted, "0.5")
    assert not (tmp_path / "a.png").exists()


def test_merged_tokens_have_no_place_in_the_picture(capsys, vlm_adapter, picture):
    argv = ["--backbone", vlm_adapter.parent / "backbone", "--reducer", "visionzip", "--keep-ratio", 0.5]
    message = refused(capsys, "generate", *argv, "--image", picture, "--prompt", "hi", "--show", "a.png")
    assert "visionzip on llava renumbers its tokens" in message


def test_mistakes_that_the_language_model_finds(capsys, dummy_evictions, text_adapter, picture):
    common = ["--adapter", text_adapter, "--prompt", TEXT]
    assert "takes text, and no images" in refused(capsys, "generate", *common, "--image", picture)
    assert "--show draws visual tokens" in refused(capsys, "generate", *common, "--image", picture, "--show", "a.png")
    assert "context_length=9999 must lie between" in refused(capsys, "generate", *common, "--context-length", 9999)
    evicted = ["--eviction", "first_visual", "--eviction-keep", 0.5]
    assert "'first_visual' reads the attention between text and image" in refused(capsys, "generate", *common, *evicted)


def test_videos_are_refused_before_weights_are_read(capsys, vlm_adapter, tmp_path, monkeypatch):
    monkeypatch.setattr("subtoken_train.cli.generate._load", lambda args: pytest.fail("weights were read"))
    wanted = "llava takes images and no videos; give its frames as images, one <image> each"
    assert wanted in refused(capsys, "generate", "--adapter", vlm_adapter, "--video", tmp_path, "--prompt", "what ?")
    frames = "--frames and --fps need --video FOLDER"
    assert frames in refused(capsys, "generate", "--adapter", vlm_adapter, "--frames", 4, "--prompt", "what ?")
