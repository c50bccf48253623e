"""Prompts for timing, sides of a comparison, interleaved rounds; the paper's protocols and printed figures."""

import re
from contextlib import contextmanager
from dataclasses import asdict

import pytest
import torch

from subtoken_train.benchmarking import paper_protocols as paper
from subtoken_train.benchmarking.comparison import ROUTED, TOKEN_ONLY, Subject
from subtoken_train.benchmarking.rounds import hold, measure, ratios
from subtoken_train.benchmarking.sides import PackedSide, Side, dense_sides, held_parts
from subtoken_train.benchmarking.synthetic_prompts import PromptParts, Shrink, draw_prompts, prompt_parts, random_family
from subtoken_train.cache.cache import PackedCache
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.families.backbone_config import BackboneConfig
from subtoken_train.families.decoder import PREFIX
from subtoken_train.families.load import layout_family
from subtoken_train.inference.cache_report import report
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.prefill import prefill
from subtoken_train.ledger.kv_budget import geometry
from subtoken_train.reducers import build_reducer
from subtoken_train.routing import RoutingConfig
from subtoken_train.routing.bank import RouterBank
from subtoken_train.types import Region
from tests.support.refusals import refuses
from tests.support.sampling import sampled
from tests.support.text_families import text_family
from tests.support.tiny.idefics3 import idefics_family
from tests.support.tiny.internvl import internvl_family
from tests.support.tiny.llava import next_family
from tests.support.tiny.llava_onevision import onevision_family
from tests.support.tiny.mistral3 import mistral3_family
from tests.support.tiny.qwen import glm_family, qwen2_family, qwen3_family, qwen_family

STEPS = 3
WHOLE = build_reducer("none")
TEXT = PromptParts(0, 0, 0, 4, 13)


def forced(side) -> torch.Tensor:
    """Logits of the prompt and of forced tokens, [B, STEPS + 1, V]."""
    with side.turn():
        logits = [side.prefill()]
        for _ in range(STEPS):
            logits.append(side.step(logits[-1].argmax(-1)[:, None]))
    return torch.stack(logits, dim=1)


def checked(family, parts) -> None:
    prompts = draw_prompts(family, parts, 2)
    packed = forced(PackedSide("packed", "", family, prompts, WHOLE, None, Compression()))
    assert packed.isfinite().all()
    for side in dense_sides(family, prompts, STEPS):
        assert torch.allclose(forced(side), packed, atol=2e-5), side.name


@pytest.mark.parametrize("kind", ["llama", "qwen2", "mistral"])
def test_transformers_caches_give_the_logits_of_the_packed_one_of_texts(kind):
    checked(text_family(kind), TEXT)


SEEING = [
    qwen_family, qwen2_family, qwen3_family, next_family, onevision_family, internvl_family, idefics_family,
    mistral3_family, glm_family,
]  # fmt: skip


def test_they_do_of_a_llavas(tiny_family):
    checked(tiny_family, prompt_parts(tiny_family))


@sampled("make", SEEING, every=3)
def test_they_do_of_one_picture_and_of_two(make):
    family = make()
    checked(family, prompt_parts(family))
    one, several = (family.visual_tokens((336, 336), together=count) for count in (1, 2))
    parts = prompt_parts(family, max(prompt_parts(family).length - one + 2 * several + 1, prompt_parts(family).length))
    assert parts.images > 1
    checked(family, parts)


def test_attention_is_transformers_own_in_a_dense_turn_and_ours_after_it():
    family = text_family("llama")
    prompts = draw_prompts(family, TEXT, 1)
    config = family.decoder.config
    forced(PackedSide("packed", "", family, prompts, WHOLE, None, Compression()))
    assert config._attn_implementation == PREFIX + "sdpa"
    with dense_sides(family, prompts, 1)[0].turn():
        assert config._attn_implementation == "sdpa"
    assert config._attn_implementation == PREFIX + "sdpa"


@sampled("kv_dtype", ["model", "int8"], every=2)
def test_a_packed_side_holds_what_its_cache_reports(tiny_family, kv_dtype):
    prompts = draw_prompts(tiny_family, prompt_parts(tiny_family), 2)
    reducer = build_reducer("fastv", 0.25)
    bank = RouterBank(RoutingConfig(), tiny_family.hidden_size, tiny_family.shape)
    side = PackedSide("routed", "", tiny_family, prompts, reducer, bank.eval(), Compression(kv_dtype=kv_dtype))
    with side.turn():
        side.step(side.prefill().argmax(-1)[:, None])
        held, entries = side.held(), side.entries()
    assert not any(layer.self_attn.v_proj._forward_hooks for layer in tiny_family.decoder.layers)
    assert entries == 16 + 19
    backbone, cache = CompressedBackbone(tiny_family, reducer, bank).eval(), PackedCache(tiny_family.shape.num_layers)
    told = report(backbone, prompts, prefill(backbone, prompts, cache, Compression(kv_dtype=kv_dtype)).plan, cache)
    assert (held["payload"], held["index"]) == (told.payload_bytes, told.index_bytes)
    assert held["tail"] == 2 * tiny_family.shape.token_bytes
    assert held["total"] == held["payload"] + held["index"] + held["tail"] + held["slack"]


class Pretended(Side):
    """Its prompt takes ``prompt`` seconds and its step ``step``; everything it does is noted."""

    def __init__(self, name, family, prompts, watch, prompt, step):
        super().__init__(name, f"pretended {name}", family, prompts)
        self.watch, self.costs, self.fed = watch, (prompt, step), []

    @contextmanager
    def turn(self):
        self.watch["now"] += 100.0  # outside of what is timed
        self.watch["turns"].append(self.name)
        yield
        self.watch["now"] += 100.0

    def prefill(self):
        self.watch["now"] += self.costs[0]
        return torch.tensor([[0.0, 1.0, 0.0]])

    def step(self, token_ids_B1):
        self.fed.append(int(token_ids_B1))
        self.watch["now"] += self.costs[1]
        return torch.tensor([[0.0, 0.0, 1.0]])

    def held(self):
        return held_parts(payload=10, index=1, tail=len(self.fed))

    def entries(self):
        return 7


@pytest.fixture
def prompts():
    family = text_family("llama")
    return family, draw_prompts(family, PromptParts(0, 0, 0, 4, 8), 1)


def test_rounds_alternate_and_only_the_side_is_timed(prompts):
    watch = {"now": 0.0, "turns": []}
    sides = [Pretended("a", *prompts, watch, 2.0, 0.25), Pretended("b", *prompts, watch, 1.0, 0.5)]
    figures = measure(sides, new_tokens=4, pairs=2, warmup=1, clock=lambda: watch["now"])
    assert watch["turns"] == ["a", "b", "a", "b", "b", "a", "a", "b"]
    assert figures["a"].prefill_seconds == [2.0, 2.0]
    assert figures["b"].step_seconds == [0.5, 0.5]
    assert ratios(figures, "a") == {"prefill": {"b": (2.0, 2.0, 2.0)}, "step": {"b": (0.5, 0.5, 0.5)}}
    assert sides[0].fed[:5] == [1, 2, 2, 2, 1]  # forced: the likeliest token, as many as asked for
    record = asdict(figures["b"])
    others = {"tail": 0, "slack": 0, "statistics": 0, "kernel": 0}
    assert record["prompt_bytes"] == {"payload": 10, "index": 1, **others, "total": 11}
    assert record["final_bytes"]["tail"] == 4
    assert record["entries"] == 7


def test_a_cpus_peak_holds_weights_prompts_and_cache_and_grows_with_the_prompt(prompts):
    family, short = prompts
    weights = sum(tensor.untyped_storage().nbytes() for tensor in family.model.parameters())
    peaks = []
    for batch in (short, draw_prompts(family, PromptParts(0, 0, 0, 4, 80), 1)):
        found = hold(PackedSide("packed", "", family, batch, build_reducer("none"), None, Compression()), 2)
        assert found.peak_bytes >= weights + found.final_bytes["total"]
        assert found.final_bytes["tail"] == 2 * family.shape.token_bytes
        peaks.append(found.peak_bytes - found.final_bytes["total"])
    assert peaks[1] > peaks[0]


CPU = torch.device("cpu")


@pytest.mark.parametrize("length", [2, 129])
def test_a_text_has_a_context_and_a_question(length):
    family = text_family("llama")
    parts = prompt_parts(family, length)
    assert (parts.length, parts.query) == (length, min(64, length // 2))
    prompts = draw_prompts(family, parts, 3)
    assert prompts.input_ids_BN.shape == (3, length)
    assert (prompts.regions_BN == Region.CONTEXT).sum(-1).tolist() == [parts.context] * 3
    assert not torch.equal(prompts.input_ids_BN[0], prompts.input_ids_BN[1])


@pytest.mark.parametrize(("length", "images"), [(83, 1), (147, 1), (148, 2), (213, 3)])
def test_as_many_whole_images_as_fit(tiny_family, length, images):
    parts = prompt_parts(tiny_family, length)
    assert (parts.length, parts.images) == (length, images)
    prompts = draw_prompts(tiny_family, parts, 2)
    assert (prompts.regions_BN == Region.VISUAL).sum(-1).tolist() == [64 * images] * 2
    assert (prompts.regions_BN == Region.SYSTEM).sum(-1).tolist() == [5] * 2
    assert prompts.images_per_sample_B.tolist() == [images] * 2
    assert not (prompts.regions_BN == Region.PADDING).any()
    if images > 1:  # a word between two of them
        assert prompts.regions_BN[0, 5 + 64] == Region.QUERY


def test_one_image_and_the_papers_text_unless_told(tiny_family):
    assert prompt_parts(tiny_family).length == 5 + 64 + 14
    assert prompt_parts(text_family("llama")).length == text_family("llama").decoder.config.max_position_embeddings // 2


def test_qwens_pictures_without_a_processor_are_those_with_one():
    family = qwen_family()
    parts = prompt_parts(family)
    drawn = draw_prompts(family, parts, 2)
    family.processor, processor = None, family.processor
    bare = draw_prompts(family, parts, 2)
    assert processor is not None
    assert torch.equal(bare.image_grid_I3, drawn.image_grid_I3)
    assert bare.pixel_values.shape == drawn.pixel_values.shape
    assert torch.equal(bare.regions_BN, drawn.regions_BN)


@sampled(
    ("path", "tokens", "width"),
    [("llava-hf/llava-1.5-7b-hf", 576, 128), ("Qwen/Qwen2.5-VL-3B-Instruct", 144, 128)],
    every=2,
)
def test_a_published_architecture_is_drawn_smaller_without_network(path, tokens, width):
    family = random_family(BackboneConfig(path=path), Shrink(layers=2, narrower=32 if "llava" in path else 16), CPU)
    assert (family.shape.num_layers, family.hidden_size, family.shape.head_dim) == (2, width, 128)
    assert family.processor is None
    assert (draw_prompts(family, prompt_parts(family), 1).regions_BN == Region.VISUAL).sum() == tokens
    assert all(parameter.isfinite().all() for parameter in family.model.parameters())


def test_what_cannot_be_drawn_is_refused():
    refuses("quantization 'nf4' is asked for", random_family, BackboneConfig(quantization="nf4"), Shrink(), CPU)


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
        assert arm["entries"] == kept + paper.SUFFIX_TOKENS
        assert arm["cache"]["payload"] == 2 * whole * (kept * (7 / 8 if "S16K12" in name else 1) + paper.SUFFIX_TOKENS)
        assert arm["peak_bytes"] > arm["cache"]["payload"]
    lines = paper.peak_lines(row, LLAMA)
    assert len(lines) == 1 + len(ARMS)
    assert lines[1].endswith("14.791")
    assert lines[3].split()[-1] != "13.985"  # no figure of a routed arm is printed
