"""SmolLM2: what follows 700 tokens of real text is read from the packed cache as in a recompute, for every eviction;
uncompressed, every way of generating gives the tokens of transformers.

The recompute is transformers' eager attention under the same masks, without a cache. Methods that need an image are
left out; those that can be calibrated run with a calibration and without, KVzap with one alone.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from subtoken_train import SubTokenModel
from subtoken_train.artifact.folder import identify
from subtoken_train.engine.attention import reading_packed
from subtoken_train.evictions import EVICTIONS, WRAPPERS, build_eviction, notation_names
from subtoken_train.evictions.duo_attention import HeadAlphas
from subtoken_train.evictions.h2o import LayerShares
from subtoken_train.evictions.queries import HeadDirections
from subtoken_train.families.backbone_config import BackboneConfig
from subtoken_train.families.decoder import CACHE
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.prompt_inputs import read_messages
from subtoken_train.inference.text_prompts import EncodedText, encode_messages, text_batch
from subtoken_train.types import Batch
from tests.support.places import ROOT, real_folder
from tests.support.prompt_views import NEEDED, drawn_centres, drawn_heads, drawn_nets, written
from tests.support.sampling import quick
from tests.support.truth_cells import from_truth

TOKENS, CONTEXT, STEPS, KEEP = 700, 650, 5, 0.25
LAYERS, HEADS, WIDTH, MODEL = 30, 3, 64, 576
METHODS = [name for name in EVICTIONS if not EVICTIONS.find(name).needs_image]
SETTINGS: dict[str, dict[str, Any]] = {
    "duo_attention": {"sinks": 16, "recent": 32},
    "simlayerkv": {"recent": 64},
    "per_layer(pyramidkv)": {"shares": tuple(range(LAYERS, 0, -1))},
    "chunk(snapkv)": {},
    "critical(expected_attention)": {},
    "pooled(keydiff)": {},
    "ada(compactor)": {},
}
"""Settings that differ from a method's own, so that it has a choice in 650 entries; and the wrappers."""


@dataclass(frozen=True)
class Case:
    """An eviction, and whether it reads a calibration."""

    notation: str
    calibrated: bool = False
    settings: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.notation + " calibrated" * self.calibrated


def numbers_of(method: str):
    draw = torch.rand(LAYERS, HEADS, WIDTH, generator=torch.Generator().manual_seed(0)) * 2 - 1
    if method == "duo_attention":
        return HeadAlphas(draw[..., 0].abs().tolist(), sinks=16, recent=32)
    if method == "prefixkv":
        return LayerShares([KEEP], [draw[:, 0, 0].abs().tolist()])
    if method == "kvzap":
        return drawn_nets(LAYERS, HEADS, MODEL)
    if method == "triattention":
        return drawn_centres(LAYERS, 3 * HEADS, WIDTH)
    return drawn_heads(LAYERS, HEADS) if method in ("headkv", "sparsemm", "lkv") else HeadDirections(draw.tolist())


PLAIN = [name for name in dict.fromkeys([*METHODS, *SETTINGS]) if name not in (*NEEDED, "triattention")]
EVERY = [Case(name, settings=SETTINGS.get(name, {})) for name in PLAIN]
EVERY += [Case(name, calibrated=True) for name in METHODS if hasattr(build_eviction(name), "calibration")]
EVERY.append(Case("lkv(knorm)", calibrated=True))
CASES = {str(case): case for case in EVERY}


def test_every_text_eviction_and_every_wrapper_has_a_case():
    assert {name for case in CASES.values() for name in notation_names(case.notation)} == {*METHODS, *WRAPPERS}
    assert sum(case.calibrated for case in CASES.values()) == 8


@pytest.fixture(scope="module")
def prompt(smollm2):
    ids = smollm2.tokenizer((ROOT / "data/samples/reference.txt").read_text(encoding="utf-8"))["input_ids"]
    return text_batch(smollm2.backbone.family, [EncodedText(tuple(ids[:TOKENS]), CONTEXT)])


@pytest.mark.parametrize("name", quick(CASES, ("kvzip", "snapkv", "ada(compactor)")))
def test_what_follows_real_text_is_the_truth(smollm2, prompt, name, tmp_path):
    case, family = CASES[name], smollm2.backbone.family
    settings = dict(case.settings)
    if case.calibrated:
        method = notation_names(case.notation)[0]
        file, identity = tmp_path / "numbers.json", identify(family, BackboneConfig(path="its own"))
        settings["calibration"] = written(file, method, numbers_of(method), identity)
    assert prompt.input_ids_BN.shape == (1, TOKENS)
    with reading_packed(family.decoder.config):
        compression = Compression(build_eviction(case.notation, **settings), KEEP)
        compression.check(family)
        found = from_truth(smollm2.backbone, prompt, STEPS, compression)
    print(f"{name}: {found.largest:.1e}")  # shown by pytest -rP
    assert found.fits("fp32"), found


NEW = 8
QUESTIONS = ["What is the capital of France?", "Name three colours of the rainbow."]
SYSTEM = {"role": "system", "content": "Answer in one word."}
STORY = "The bee and the spider met in the garden. The bee was late.\n"
ABOUT = ["Who was late?", "Where did they meet?"]
RAW = "The capital of France is"
GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}


class Both:
    """SmolLM2 behind ``SubTokenModel``, and what transformers says by itself, greedily; each answer is made once."""

    def __init__(self, ours: SubTokenModel) -> None:
        self.ours, self.bare, self.tokenizer = ours, ours.backbone.model, ours.tokenizer
        self.whole = cache(lambda text: self.bare.generate(**self.encoded(text), **GREEDY)[0])

    def encoded(self, *texts: str, side: str = "left") -> dict[str, torch.Tensor]:
        return dict(self.tokenizer(list(texts), return_tensors="pt", padding=True, padding_side=side))

    def rendered(self, prompt: Any) -> str:
        return self.tokenizer.apply_chat_template(read_messages(prompt)[0], tokenize=False, add_generation_prompt=True)

    def answer(self, prompt: Any) -> list[int]:
        text = self.rendered(prompt)
        return self.whole(text)[len(self.tokenizer(text)["input_ids"]) :].tolist()

    def said(self, prompt: Any) -> str:
        return self.tokenizer.decode(self.answer(prompt), skip_special_tokens=True).strip()

    def batch(self, prompts: list[Any]) -> Batch:
        family = self.ours.backbone.family
        return text_batch(family, [encode_messages(family, read_messages(prompt)[0]) for prompt in prompts])


@pytest.fixture(scope="module")
def both(smollm2):
    return Both(smollm2)


def padded_on_the_right(both):
    given = both.encoded(*map(both.rendered, QUESTIONS), side="right")
    rows = both.ours.generate(**given, **GREEDY)[:, given["input_ids"].shape[1] :].tolist()
    end = both.tokenizer.eos_token_id
    return [row[: row.index(end) + 1] if end in row else row for row in rows], list(map(both.answer, QUESTIONS))


def a_further_turn(both):
    """A first answer and a further turn on its cache, by each."""
    found, given = [], both.encoded(both.rendered(QUESTIONS[1]))
    more = both.tokenizer("\n<|im_start|>user\nAnd two?<|im_end|>\n<|im_start|>assistant\n", return_tensors="pt")
    for generate, held in ((both.ours.generate, {}), (both.bare.generate, {CACHE: DynamicCache()})):
        first = generate(**given, **held, **{**GREEDY, "max_new_tokens": 4})
        kept, whole = held.get(CACHE) or both.ours.last.cache, torch.cat([first, more["input_ids"]], 1)
        out = generate(input_ids=whole, attention_mask=torch.ones_like(whole), **{CACHE: kept}, **GREEDY)
        found.append(out[0, whole.shape[1] :].tolist())
    return found


def chats(both):
    talk = [SYSTEM, {"role": "user", "content": QUESTIONS[0]}]
    said = [both.ours.chat(each, **GREEDY) for each in (QUESTIONS[0], talk)]
    assert "Paris" in said[0]
    return said, [both.said(QUESTIONS[0]), both.said(talk)]


def questions_behind_a_system_prompt(both):
    said = both.ours.ask(STORY, ABOUT, system=SYSTEM["content"], max_new_tokens=NEW)
    return said, [both.said([SYSTEM, {"role": "user", "content": STORY + each}]) for each in ABOUT]


def in_lm_evaluation_harness(both):
    harness = pytest.importorskip("lm_eval.models.huggingface")
    from lm_eval.api.instance import Instance

    from subtoken_train.plugins.lm_eval_model import SubTokenLM

    asked = {"until": ["\n"], "max_gen_toks": NEW, "do_sample": False}
    requests = [Instance("generate_until", {}, (text, asked), 0) for text in (RAW, STORY + "The spider")]
    ours = SubTokenLM(backbone=str(real_folder("smollm2")), dtype="float32", device="cpu", batch_size=2)
    theirs = harness.HFLM(pretrained=both.bare, tokenizer=both.tokenizer, batch_size=2)
    return [model.generate_until(requests, disable_tqdm=True) for model in (ours, theirs)]


QUICK_WAYS = (padded_on_the_right, a_further_turn, chats)
WAYS: dict[str, Callable[..., Any]] = {
    way.__name__: way for way in (*QUICK_WAYS, questions_behind_a_system_prompt, in_lm_evaluation_harness)
}


@pytest.mark.parametrize("name", quick(WAYS, [way.__name__ for way in QUICK_WAYS]))
def test_each_way_says_what_transformers_says(both, name):
    ours, theirs = WAYS[name](both)
    assert ours == theirs
    assert ours
