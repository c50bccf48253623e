"""The paper's protocols: prompts, arms, departures and printed figures."""

import re

import pytest
import torch

from subtoken_train.benchmarking import paper_protocols as paper
from subtoken_train.benchmarking.comparison import ROUTED, TOKEN_ONLY, Subject
from subtoken_train.benchmarking.synthetic_prompts import Shrink, prompt_parts
from subtoken_train.families.backbone_config import BackboneConfig
from subtoken_train.families.load import layout_family
from subtoken_train.inference.compression import Compression
from subtoken_train.ledger.kv_budget import geometry
from subtoken_train.reducers import build_reducer
from tests.support.refusals import refuses
from tests.support.sampling import sampled
from tests.support.text_families import text_family

LENGTHS = {"llava": (595, [163, 91]), "Qwen": (171, [63, 45])}
NO_GPU = "on a META, without its memory allocator's peak"


def laid_out(path, shrink=None):
    return layout_family(BackboneConfig(path=path, dtype=paper.DTYPE), None if shrink is None else shrink.apply)


@sampled("path", paper.PAPER, every=4)
def test_prompts_have_the_papers_lengths_and_a_whole_run_departs_in_nothing(path):
    family = laid_out(path)
    paper.check_protocol(family)
    parts = prompt_parts(family)
    whole, kept = LENGTHS[path[:4] if path.startswith("Qwen") else path[:5]]
    text = parts.length - parts.image_tokens
    assert parts.length == whole
    for name in paper.REDUCERS:
        assert [text + build_reducer(name, r).kept_tokens(parts.image_tokens) for r in paper.KEEP_RATIOS] == kept
    assert paper.departures(family, path, parts, paper.NEW_TOKENS, paper.DTYPE) == [NO_GPU]


def test_what_is_scaled_is_said():
    path = "llava-hf/llava-1.5-7b-hf"
    family = laid_out(path, Shrink(layers=4, narrower=4))
    assert paper.departures(family, path, prompt_parts(family), 8, "float32") == [
        "layers 4 instead of 32", "width 1,024 instead of 4,096", "heads 8 instead of 32",
        "layers of the vision tower 4 instead of 24", NO_GPU, "float32 instead of bfloat16",
        "8 forced tokens instead of 256",
    ]  # fmt: skip
    other = "llava-hf/llava-v1.6-vicuna-7b-hf"
    found = paper.departures(laid_out(other), other, prompt_parts(laid_out(other)), paper.NEW_TOKENS, paper.DTYPE)
    assert found[0] == f"{other} is none of the paper's backbones"
    assert found[-1].startswith("an image of ")


def test_another_gpu_and_quantised_weights_are_said(monkeypatch):
    path = "llava-hf/llava-1.5-7b-hf"
    family = laid_out(path)
    parts = prompt_parts(family)
    monkeypatch.setattr(type(family), "device", torch.device("cuda"))
    for name, said in {"NVIDIA H100 NVL": [], "NVIDIA A100": ["on NVIDIA A100 instead of H100 NVL"]}.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, name=name: name)
        assert paper.departures(family, path, parts, paper.NEW_TOKENS, paper.DTYPE) == said
    assert paper.departures(family, path, parts, paper.NEW_TOKENS, paper.DTYPE, "nf4")[-1] == "weights in nf4"


def test_a_scaled_qwens_tower_can_say_what_it_attended_to(tiny_family):
    """The tower of fewer blocks keeps a last one that sees the whole image, which VisionZip reads."""
    tower = laid_out("Qwen/Qwen2.5-VL-3B-Instruct", Shrink(layers=4, narrower=4)).model.config.vision_config
    assert tower.fullatt_block_indexes == [tower.depth - 1] == [3]
    refuses("--table8 is about a prompt with an image", paper.check_protocol, text_family("llama"))
    refuses(r"--peak-memory is about a language model's prefix.*--table8 is", paper.memory_prompt, tiny_family)


def test_the_papers_figures_are_the_papers(shared):
    text = (shared / "papers" / "subtoken_routing.txt").read_text()
    table = text[text.index("Table 8: VLM inference-cost summary") :]
    for path, figures in paper.PAPER.items():
        name = path.split("/")[1].removesuffix("-hf").removesuffix("-Instruct")
        line = re.search(rf"^{name} .*$", table, re.MULTILINE | re.IGNORECASE)
        assert line is not None, name
        percents = [float(found) / 100 for found in re.findall(r"\+([\d.]+)%\+", line[0])]
        assert percents == pytest.approx([*figures["prefill"], *figures["step"]])
        peaks = "".join(2 * str(each) for each in figures["peak_gb"])
        assert f" {peaks} GB" in line[0]


def test_overheads_are_over_the_same_tokens():
    ratios = {"prefill": {TOKEN_ONLY: (1.1, 1.0, 1.2)}, "step": {TOKEN_ONLY: (0.9, 0.8, 1.0)}}
    row = {"pairs": 5, "prompt": {"length": 595}, "sides": {ROUTED: {"entries": 163}}, "ratios": ratios}
    said = paper.overhead_line("fastv 25.0%", row, "llava-hf/llava-1.5-7b-hf")
    assert said.startswith("fastv 25.0%: 595 -> 163 tokens; prefill +10.0 % [+0.0, +20.0] (paper +28.9% to +46.1%), ")
    assert "decode -10.0 % [-20.0, +0.0] (paper +35.6% to +55.2%)" in said
    assert "paper" not in paper.overhead_line("fastv 25.0%", row, "checkpoints/tiny-llava")
    once = paper.overhead_line("fastv 25.0%", row | {"pairs": 1}, "checkpoints/tiny-llava")
    assert once.endswith("prefill +10.0 %, decode -10.0 % over token-only at the same keep ratio")


LLAMA = "meta-llama/Llama-2-7b-hf"
ARMS = ["no compression", "quest 25%", "quest 25% + S16K12", "quest 12.5%", "quest 12.5% + S16K12"]


def test_the_printed_peaks_lie_apart_by_the_dropped_tokens():
    """In GB of 10^9 bytes, to the printed digits: 2,048 tokens of LLaMA-2-7B less those that Quest keeps."""
    token = geometry("llama-2-7b").token_bytes / 1e9
    for name, keep_ratio in (("quest 25%", 0.25), ("quest 12.5%", 0.125)):
        dropped = paper.PREFIX_TOKENS - build_reducer("quest", keep_ratio).kept_tokens(paper.PREFIX_TOKENS)
        apart = paper.PEAK_GB[LLAMA]["no compression"] - paper.PEAK_GB[LLAMA][name]
        assert apart == pytest.approx(dropped * token, abs=1e-3)


def test_the_arms_and_their_bytes(monkeypatch):
    """On a random Llama of two layers, with a prefix of 512 tokens: the cache is what the budget says."""
    monkeypatch.setattr(paper, "PREFIX_TOKENS", 512)
    subject, done = Subject(text_family(layers=2), build_reducer("none"), None, Compression()), []
    row = paper.measure_memory(subject, lambda number, of: done.append((number, of)))
    assert done == [(number, len(ARMS)) for number in range(1, len(ARMS) + 1)]
    assert list(row["arms"]) == ARMS
    assert row["prompt"]["length"] == 512 + paper.SUFFIX_TOKENS
    whole = 2 * 2 * 16 * 4  # bytes of an entry: keys and values of two heads
    for name, arm in row["arms"].items():
        kept = 512 if name == "no compression" else 128 if "25%" in name else 64
        share = 7 / 8 if "S16K12" in name else 1
        assert arm["entries"] == kept + paper.SUFFIX_TOKENS
        assert arm["cache"]["payload"] == 2 * whole * (kept * share + paper.SUFFIX_TOKENS)
        assert arm["peak_bytes"] > arm["cache"]["payload"]
    lines = paper.peak_lines(row, LLAMA)
    assert len(lines) == 1 + len(ARMS)
    assert lines[1].endswith("14.791")
    assert lines[3].split()[-1] != "13.985"  # no figure of a routed arm is printed
