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
    asked = "is there a 0 ?"
    prompt = ["--image", picture, "--prompt", asked, "--max-new-tokens", 6]
    answer, line = lines(capsys, "--adapter", vlm_adapter, *prompt)
    model = SubTokenModel.from_pretrained(vlm_adapter)
    assert answer.strip() == model.chat(asked, [Image.open(picture)], max_new_tokens=6, do_sample=False)
    assert LINE.fullmatch(line).group(1, 3, 4, 5) == ("6", "15.6250", "15.6250", None)


def test_beams_sampling_and_eviction(vlm_adapter, picture, capsys, dummy_evictions):
    common = ["--adapter", vlm_adapter, "--image", picture, "--prompt", "hi", "--max-new-tokens", 4]
    assert LINE.fullmatch(lines(capsys, *common, "--num-beams", 2)[-1])
    assert LINE.fullmatch(lines(capsys, *common, "--temperature", 0.7)[-1])
    assert lines(capsys, *common, "--temperature", "1e-40")[0] == lines(capsys, *common)[0]  # greedy
    evicted = ["--eviction", "first_visual", "--eviction-keep", "0.5", "--eviction-option", "window=2"]
    line = lines(capsys, *common, *evicted, "--kv-dtype", "int8", "--device", "cpu")[-1]
    assert "%, in int8); compressed region 7.8125% of its KV (12.5% of its entries; before the eviction nominal" in line
    assert LINE.fullmatch(line).group(3, 4, 5) == ("7.8125", "15.6250", "first_visual 0.5 int8")
    reducer = ["--reducer", "fastv", "--keep-ratio", 0.25, "--eviction", "first", "--eviction-keep", "9tokens"]
    out = lines(capsys, "--backbone", vlm_adapter.parent / "backbone", "--image", picture, "--prompt", "hi", *reducer)
    assert LINE.fullmatch(out[-1]).group(4, 5) == ("25.0000", "first 9 tokens")


def test_long_prompts_come_from_stdin(text_adapter, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(TEXT + "\n"))
    found = LINE.fullmatch(lines(capsys, "--adapter", text_adapter, "--prompt", "-", "--context-length", 64)[-1])
    assert (found[3], found[4]) == ("31.2500", "31.2500")
    tokenizer = SubTokenModel.from_pretrained(text_adapter).tokenizer
    assert int(found[2]) == len(tokenizer(TEXT)["input_ids"])
    line = lines(capsys, "--adapter", text_adapter, "--prompt", "a bee")[-1]  # a short text is answered whole
    assert "; no visual token and no context to compress; index 0" in line


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
        (["--eviction", "first", "--eviction-keep", ""], "'' is not a budget; write a fraction (0.1)"),
        (["--eviction", "first", "--eviction-keep", "1e400MB"], "'1e400MB' is not a budget; write a fraction (0.1)"),
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


def test_mistakes_that_the_model_finds(capsys, dummy_evictions, vlm_adapter, text_adapter, picture, tmp_path):
    corrupt, hi, image = tmp_path / "corrupt.png", ["--prompt", "hi"], ["--image", picture]
    corrupt.write_bytes(b"\x89PNG\r\n\x1a\n nothing")
    sees, reads = ["--adapter", vlm_adapter], ["--adapter", text_adapter, "--prompt", TEXT]
    plain = ["--backbone", vlm_adapter.parent / "backbone"]
    evicted, show = ["--eviction", "first_visual", "--eviction-keep"], ["--show", tmp_path / "a.png"]
    for argv, words in (
        (hi, "give --adapter DIR, or --backbone PATH"),
        (["--adapter", tmp_path, *hi], "not an adapter folder"),
        (["--backbone", tmp_path, *hi], "neither a folder with a config.json"),
        ([*sees, *hi, "--reducer", "fastv", "--keep-ratio", 0.5], "is an adapter with its own token reducer"),
        ([*sees, "--image", corrupt, *hi], f"image {corrupt} cannot be read"),
        ([*sees, *image, "--prompt", "<image><image> hi"], "2 image placeholders but 1 images"),
        ([*sees, *image, "--prompt", " "], "the prompt is empty"),
        ([*sees, *image, *hi, "--context-length", 3], "context_length is for language models"),
        ([*sees, *image, *hi, *show, "--show-layers", "0,3"], "0,3: layers are numbers from 0 to 2, with commas"),
        ([*sees, *image, *hi, *evicted, "100B"], "too small for "),
        ([*sees, *hi, *evicted, "0.5"], "'prompt 0' has no image"),
        ([*plain, "--reducer", "visionzip", "--keep-ratio", 0.5, *image, *hi, *show], "visionzip on llava renumbers"),
        ([*reads, *image], "takes text, and no images"),
        ([*reads, *image, *show], "--show draws visual tokens"),
        ([*reads, "--context-length", 9999], "context_length=9999 must lie between"),
        ([*reads, *evicted, 0.5], "'first_visual' reads the attention between text and image"),
    ):
        assert words in refused(capsys, "generate", *argv)
    assert not (tmp_path / "a.png").exists()


def test_videos_are_refused_before_weights_are_read(capsys, vlm_adapter, tmp_path, monkeypatch):
    monkeypatch.setattr("subtoken_train.cli.generate._load", lambda args: pytest.fail("weights were read"))
    wanted = "llava takes images and no videos; give its frames as images, one <image> each"
    assert wanted in refused(capsys, "generate", "--adapter", vlm_adapter, "--video", tmp_path, "--prompt", "what ?")
    frames = "--frames and --fps need --video FOLDER"
    assert frames in refused(capsys, "generate", "--adapter", vlm_adapter, "--frames", 4, "--prompt", "what ?")
