"""A model that gives NaN or infinity is said in one sentence, whatever acts on its tokens and its cache."""

import math
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from subtoken_train.calibrating import CALIBRATORS
from subtoken_train.engine.prompt_pass import are_finite, broken_rows, check_logits
from subtoken_train.evictions import EVICTIONS
from subtoken_train.inference.batched import generate_batch, score_batch
from subtoken_train.inference.model import SubTokenModel
from subtoken_train.inference.prompt_inputs import batch_from_inputs
from subtoken_train.types import Identity
from tests.support.generation_cells import CELL, PLAIN
from tests.support.helpers import compress
from tests.support.refusals import refuses
from tests.support.sampling import sampled
from tests.support.text_families import text_family
from tests.support.truth_cells import REDUCERS as LEVELS
from tests.support.truth_cells import backbone_of, compression_of, shows_videos
from tests.support.truth_models import CHAINS, OF_TEXT, TEXT, prompts

WORDS = r"the model gave NaN or infinite numbers for '.*', computing in float32; there is no wider dtype"
NARROW = (
    r"the model gave NaN or infinite numbers .*, computing in float16; choose a wider dtype \(bfloat16 or float32\)$"
)
LATE = "the model gave NaN or infinite numbers (at token|in the first) .* of an answer"


@contextmanager
def broken(family, kind: str):
    """A model that overflows, or that holds a NaN since it was loaded; whole again afterwards."""
    before = {name: tensor.clone() for name, tensor in _tensors(family)}
    layers = family.decoder.layers
    with torch.no_grad():
        if kind == "half":
            family.model.half()
            layers[0].mlp.down_proj.weight.mul_(3e4)
        elif kind == "tower":
            next(p for n, p in family.model.named_parameters() if "vision" in n).view(-1)[0] = math.nan
        elif kind == "infinite":
            layers[1].mlp.down_proj.weight[0, 0] = math.inf
        else:
            layers[-1].self_attn.q_proj.weight[0] = math.nan
    try:
        yield
    finally:
        family.model.float()
        for name, tensor in _tensors(family):
            tensor.data.copy_(before[name])


def _tensors(family):
    """Return every parameter and buffer; rotary frequencies, which half rounds, are in no state_dict."""
    return [*family.model.named_parameters(), *family.model.named_buffers()]


def refused(kind: str, chunk: int | None = None, **levels: str) -> None:
    cell = {**CELL, **PLAIN, **levels}
    backbone, compression = backbone_of(cell), replace(compression_of(cell), prefill_chunk=chunk)
    batch = prompts(backbone.family, "three", pad_left=True, videos=backbone.reducer.reads_frames)
    with broken(backbone.family, kind):
        if kind == "half" and batch.pixel_values is not None:
            batch = replace(batch, pixel_values=batch.pixel_values.half())
        with pytest.raises(ValueError, match=NARROW if kind == "half" else WORDS) as raised:
            generate_batch(backbone, batch, max_new_tokens=2, compression=compression)
    assert len(str(raised.value)) <= 400


@sampled("name", [*EVICTIONS, *CHAINS], every=3)
def test_every_eviction(name):
    method = EVICTIONS.get(name)
    families = ["llava_gqa"] if method is not None and method.needs_image else ["llama", "llava_gqa"]
    for family in families:
        for kind in ("half", "query"):
            refused(kind, family=family, eviction=name)
    compression = compression_of({**CELL, **PLAIN, "family": families[-1], "eviction": name})
    try:
        replace(compression, prefill_chunk=64)
    except ValueError:  # it cannot
        return
    refused("query", 64, family=families[-1], eviction=name)


@sampled("level", LEVELS, every=3)
def test_every_reducer(level):
    seeing = level not in OF_TEXT
    family = "llava_onevision" if shows_videos(level) else "llava_gqa" if seeing else TEXT[0]
    for kind in ("half", "infinite", *(["tower"] if seeing else [])):
        refused(kind, family=family, reducer=level)


@pytest.fixture
def late():
    """A model that gives NaN after one token of its answers only, which is not its first."""
    family = text_family(layers=2)
    model = SubTokenModel(family.model, family.tokenizer)
    ids = torch.randint(10, 60, (1, 20), generator=torch.Generator().manual_seed(2))
    said = model.generate(input_ids=ids, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)[0, 20:]
    with torch.no_grad():
        family.model.get_input_embeddings().weight[said[2]] = math.nan
    assert said[2] not in (*ids[0].tolist(), *said[:2].tolist())
    return model, ids


@pytest.mark.parametrize("settings", [{}, {"do_sample": True, "top_k": 1}, {"num_beams": 2}])
def test_an_answer_that_turns_nan(late, settings):
    model, ids = late
    given = {"do_sample": False, **settings, "eos_token_id": None, "pad_token_id": 0}
    refuses(LATE, lambda: model.generate(input_ids=ids, max_new_tokens=6, **given))
    assert model.generate(input_ids=ids, max_new_tokens=1, **given).shape == (1, 21), "it serves the next call"


def test_an_answer_that_turns_nan_in_a_batch_and_a_text_that_is_scored(late):
    model, ids = late
    batch = batch_from_inputs(model.backbone.family, ids, torch.ones_like(ids).bool(), {}, None)
    backbone = model.backbone
    found = generate_batch(backbone, batch, max_new_tokens=3)[0]
    refuses(LATE, generate_batch, backbone, batch, max_new_tokens=4)
    bad = found.token_ids[2]
    refuses("infinite numbers for a text that is scored", score_batch, backbone, batch, [[[5, bad, 6]]])
    assert math.isfinite(score_batch(backbone, batch, [[[5, 6, bad]]])[0].logprobs[0]), "its last token is only read"


@pytest.mark.parametrize("name", ["q_filter", "duo_attention", "headkv", "kvzap", "triattention"])
def test_calibrations(name):
    family = text_family(layers=2)
    settings = {"samples": 2, "batch_size": 2, "context_length": 128}
    backbone = compress(family).eval()
    with broken(family, "infinite"), pytest.raises(ValueError, match="NaN or infinite numbers"):
        CALIBRATORS.find(name)(**settings).run(backbone, Identity("x", None, "llama", "0"))


def test_what_counts_as_a_number():
    logits_BV = torch.tensor([[1.0, -math.inf], [math.nan, 0], [math.inf, 0], [-math.inf, -math.inf]])
    assert broken_rows(logits_BV).tolist() == [False, True, True, True]
    refuses(r"for 'b', computing in float32", check_logits, logits_BV, "abcd")
    check_logits(logits_BV[:1], "a")
    found = [bool(are_finite(torch.tensor(x))) for x in ([], [1.0, 2.0], [1.0, math.nan], [-math.inf])]
    assert found == [True, True, False, False]
