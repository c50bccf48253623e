"""``subtoken-train generate``: one prompt and its line of figures, a file of prompts, and mistakes in one line."""

import io
import json
import re

import pytest
from PIL import Image

from subtoken_train import SubTokenModel
from subtoken_train.cli.main import main
from tests.support.chats import CHATML
from tests.support.commands import printed, refused
from tests.support.helpers import write_text_adapter
from tests.support.tape import on_tape

LINE = re.compile(
    r"(\d+) tokens after (\d+) \| KV [\d,]+ bytes in \w+, [\d.]+% of the full cache in bfloat16; compressed region: (?:"
    r"[\d.]+% of its entries, )?([\d.]+)% of its keys and values kept \(nominal ([\d.]+)%(?: before the eviction)?\); "
    r"index [\d,]+, slack [\d,]+ bytes"
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


def test_sampling_and_eviction(vlm_adapter, picture, capsys, dummy_evictions):
    common = ["--adapter", vlm_adapter, "--image", picture, "--prompt", "hi", "--max-new-tokens", 4]
    assert LINE.fullmatch(lines(capsys, *common, "--temperature", 0.7)[-1])
    assert lines(capsys, *common, "--temperature", "1e-40")[0] == lines(capsys, *common)[0]  # greedy
    evicted = ["--eviction", "first_visual", "--eviction-keep", "0.5", "--eviction-option", "window=2"]
    line = lines(capsys, *common, *evicted, "--kv-dtype", "int8", "--device", "cpu")[-1]
    assert "compressed region: 12.5% of its entries, 7.8% of its keys and values kept (nominal 15.6%" in line
    assert LINE.fullmatch(line).group(3, 4, 5) == ("7.8", "15.6", "first_visual 0.5 int8")
    reducer = ["--reducer", "fastv", "--keep-ratio", 0.25, "--eviction", "first", "--eviction-keep", "9tokens"]
    out = lines(capsys, "--backbone", vlm_adapter.parent / "backbone", "--image", picture, "--prompt", "hi", *reducer)
    assert LINE.fullmatch(out[-1]).group(4, 5) == ("25.0", "first 9 tokens")


def test_long_prompts_come_from_stdin(text_adapter, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(TEXT + "\n"))
    found = LINE.fullmatch(lines(capsys, "--adapter", text_adapter, "--prompt", "-", "--context-length", 64)[-1])
    assert (found[3], found[4]) == ("31.2", "31.2")
    assert int(found[2]) == len(SubTokenModel.from_pretrained(text_adapter).tokenizer(TEXT)["input_ids"])
    line = lines(capsys, "--adapter", text_adapter, "--prompt", "a bee")[-1]  # a short text is answered whole
    assert "; no visual token and no context to compress; index 0" in line
    monkeypatch.setattr("subtoken_train.cli.generate.LONG", 100)
    monkeypatch.setattr("subtoken_train.inference.decode_step.DEVICES", ("cpu",))
    monkeypatch.setattr("subtoken_train.inference.decode_step.capture", on_tape)
    assert main(["generate", "--adapter", str(text_adapter), "--prompt", TEXT, "--max-new-tokens", "12"]) == 0
    out, told = capsys.readouterr()
    assert re.match(r"1/(\d+) layers of the prompt, [^\n]+ left\n(.*\n)*\1/\1 layers of the prompt\n", told)
    assert "; decoded captured in a graph" in out  # nothing watches the steps


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


def test_mistakes_that_the_model_finds(capsys, dummy_evictions, vlm_adapter, text_adapter, picture, tmp_path):
    corrupt, hi, image = tmp_path / "corrupt.png", ["--prompt", "hi"], ["--image", picture]
    corrupt.write_bytes(b"\x89PNG\r\n\x1a\n nothing")
    sees, reads = ["--adapter", vlm_adapter], ["--adapter", text_adapter, "--prompt", TEXT]
    plain = ["--backbone", vlm_adapter.parent / "backbone"]
    evicted, show = ["--eviction", "first_visual", "--eviction-keep"], ["--show", tmp_path / "a.png"]
    for argv, words in (
        (["--backbone", tmp_path, *hi], "neither a folder with a config.json"),
        (["--backbone", "nowhere", *hi], "or take another: 'subtoken-train data smollm2' fetches a small one"),
        ([*sees, "--image", corrupt, *hi], f"image {corrupt} cannot be read"),
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


LINES = [
    {"id": "b", "prompt": "is there a 0 ?", "image": "a.png"},
    {"prompt": "where is <image> beside <image> ?", "images": ["a.png", "sub/b.png"]},
    {"id": 7, "prompt": "hello there"},
]


@pytest.fixture
def asked(tmp_path):
    """A file of three prompts, with its images."""
    (tmp_path / "in" / "sub").mkdir(parents=True)
    for name in ("a.png", "sub/b.png"):
        Image.effect_noise((60, 40), 60).convert("RGB").save(tmp_path / "in" / name)
    return write(tmp_path / "in" / "prompts.jsonl", *LINES)


def write(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def command(adapter, prompts, output, *argv):
    files = "--adapter", adapter, "--prompts", prompts, "--output", output
    return ["generate", "--device", "cpu", *files, "--max-new-tokens", "5", *argv]


def call(capsys, *argv):
    return main([*map(str, command(*argv))]), capsys.readouterr().err


def stopped(capsys, *argv):
    """The message of a call that must be refused."""
    return refused(capsys, *command(*argv), reports=True)


def answers(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.slow
def test_answers_are_those_of_single_prompts(vlm_adapter, asked, tmp_path, capsys):
    output = tmp_path / "out.jsonl"
    assert call(capsys, vlm_adapter, asked, output)[0] == 0
    found = answers(output)
    assert [row["id"] for row in found] == ["b", "2", "7"]
    model = SubTokenModel.from_pretrained(vlm_adapter)
    for row, line in zip(found, LINES, strict=True):
        names = line.get("images", [line["image"]] if "image" in line else [])
        images = [Image.open(asked.parent / name) for name in names]
        assert row["answer"] == model.chat(line["prompt"], images, max_new_tokens=5, do_sample=False)
        assert (0 < row["kv_bytes"] < row["dense_kv_bytes"]) if names else row["kv_bytes"] == row["dense_kv_bytes"]
        assert 1 <= row["tokens"] <= 5
        assert row["seconds"] > 0
    assert sorted(found[0]) == ["answer", "dense_kv_bytes", "id", "kv_bytes", "seconds", "tokens"]
    together = tmp_path / "together.jsonl"
    assert call(capsys, vlm_adapter, asked, together, "--batch-size", 3)[0] == 0
    assert [row["answer"] for row in answers(together)] == [row["answer"] for row in found]


def test_a_run_goes_on_where_it_stopped(vlm_adapter, asked, tmp_path, capsys, monkeypatch):
    whole, output = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    assert call(capsys, vlm_adapter, asked, whole)[0] == 0

    def stopping(what):
        def stop(done, total):
            raise KeyboardInterrupt

        return stop

    with monkeypatch.context() as patch:
        patch.setattr("subtoken_train.cli.generate.counter", stopping)
        code, err = call(capsys, vlm_adapter, asked, output)
    assert code == 130
    assert "the answers so far are in" in err
    (first,) = answers(output)
    (samples,) = (tmp_path / "out.jsonl.records").glob("samples-*.jsonl")
    with samples.open("ab") as file:
        file.write(b'{"id":"torn')  # as a kill leaves it
    assert call(capsys, vlm_adapter, asked, output)[0] == 0
    kept = [row for row in answers(output) if row["id"] == first["id"]]
    assert kept == [first]  # seconds too: it was not answered again
    assert [row["answer"] for row in answers(output)] == [row["answer"] for row in answers(whole)]
    write(asked, *LINES, {"prompt": "one more"})
    assert call(capsys, vlm_adapter, asked, output)[0] == 0
    assert [row["id"] for row in answers(output)] == ["b", "2", "7", "4"]


def test_other_prompts_or_settings_are_refused(vlm_adapter, asked, tmp_path, capsys):
    output = tmp_path / "out.jsonl"
    assert call(capsys, vlm_adapter, asked, output)[0] == 0
    before = output.read_bytes()
    for argv, words in (
        (["--max-new-tokens", 6], "task options {'max_new_tokens': 5}, and now it is {'max_new_tokens': 6}"),
        (["--kv-dtype", "int8"], "int8"),
    ):
        said = stopped(capsys, vlm_adapter, asked, output, *argv)
        assert "was begun with other prompts or settings" in said
        assert words in said
    write(asked, {**LINES[0], "prompt": "another"}, *LINES[1:])
    assert "answers to other samples" in stopped(capsys, vlm_adapter, asked, output)
    assert output.read_bytes() == before
    (tmp_path / "mine.jsonl").write_text("{}\n")
    said = stopped(capsys, vlm_adapter, asked, tmp_path / "mine.jsonl")
    assert "has no mine.jsonl.records to continue from" in said


def test_a_chat_template_is_asked_unless_the_prompts_are_raw(tmp_path, capsys):
    adapter = write_text_adapter(tmp_path)
    (tmp_path / "backbone" / "chat_template.jinja").write_text(CHATML)
    talk = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the bee ?"}]
    prompts = write(tmp_path / "p.jsonl", {"prompt": "the bee"}, {"messages": talk})
    assert "raw prompts are texts" in stopped(capsys, adapter, prompts, tmp_path / "raw.jsonl", "--raw")
    assert call(capsys, adapter, prompts, tmp_path / "out.jsonl")[0] == 0
    model = SubTokenModel.from_pretrained(adapter)
    wanted = [model.chat(asked, max_new_tokens=5, do_sample=False) for asked in ("the bee", talk)]
    assert [row["answer"] for row in answers(tmp_path / "out.jsonl")] == wanted
    write(prompts, {"prompt": "the bee"})
    said = stopped(capsys, adapter, prompts, tmp_path / "out.jsonl", "--raw")
    assert "was begun with other prompts or settings" in said
    write(prompts, {"messages": [{"role": "usr", "content": "hi"}]})
    said = stopped(capsys, adapter, prompts, tmp_path / "other.jsonl")
    assert "p.jsonl, line 1: unknown role of message 1 'usr'" in said
    assert main(["generate", "--adapter", str(adapter), "--prompt", "the bee", "--raw", "--max-new-tokens", "2"]) == 0
    assert "a raw prompt for a model with a chat template" in capsys.readouterr().err


def test_a_chat_template_gets_its_variables(tmp_path, capsys):
    adapter = write_text_adapter(tmp_path)
    ends = "{% if m.role == 'user' and style is defined %}{{ style }}{% endif %}{% endfor %}{% if add"
    (tmp_path / "backbone" / "chat_template.jinja").write_text(CHATML.replace("{% endfor %}{% if add", ends))
    prompts, given = write(tmp_path / "p.jsonl", {"prompt": "the bee"}), ("--chat-template-kwargs", '{"style": "the"}')
    assert call(capsys, adapter, prompts, tmp_path / "out.jsonl", *given)[0] == 0
    model = SubTokenModel.from_pretrained(adapter)
    wanted = model.chat("the bee", max_new_tokens=5, do_sample=False, chat_template_kwargs={"style": "the"})
    (row,) = answers(tmp_path / "out.jsonl")
    assert row["answer"] == wanted
    assert "was begun with other prompts or settings" in stopped(capsys, adapter, prompts, tmp_path / "out.jsonl")
    alone = ["generate", "--adapter", adapter, "--prompt", "the bee", *given, "--max-new-tokens", 5]
    assert printed(capsys, *alone).strip().startswith(wanted)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"messages": []}, "line 2: the prompt has no message"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "line 2: the last message is the assistant's"),
        ({"prompt": " " * 1_100_000 + "x"}, "line 2: the prompt holds 1,000,000 blanks in a row, at which tokenizers"),
        ({"prompt": 3}, "line 2: prompt is 3; it must be a text"),
        ({"promt": "x"}, "line 2: unknown key 'promt'. Did you mean 'prompt'?"),
        ({"prompt": "x", "imgae": "a.png"}, "line 2: unknown key 'imgae'. Did you mean 'image'?"),
        ({"prompt": "x", "image": "a.png", "images": []}, "line 2: image and images are given"),
        ({"prompt": "x", "images": [3]}, "line 2: images"),
        ({"prompt": "x", "image": "none.png"}, "none.png is missing; check the path"),
        ({"prompt": "x", "image": "../a.png"}, "line 2: image '../a.png' lies outside of"),
        ({"prompt": "<image> x"}, "line 2: 1 <image> in the prompt, 0 images; write one for each"),
        ({"prompt": "x", "id": "a"}, "line 2: id 'a' appears twice, first in"),
        ("x", "line 2: expected a JSON object"),
    ],
)
def test_mistakes_name_their_line(vlm_adapter, tmp_path, capsys, line, words):
    prompts = write(tmp_path / "p.jsonl", {"id": "a", "prompt": "hi"}, line)
    assert words in stopped(capsys, vlm_adapter, prompts, tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl.records").exists()
