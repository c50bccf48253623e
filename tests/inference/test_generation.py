"""``generate`` of transformers on packed caches: its loop, beams, further turns, streamers and criteria."""

from __future__ import annotations

import pytest
import torch
from transformers import GenerationConfig, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from subtoken_train.inference.greedy import generate_greedy
from subtoken_train.inference.model import SubTokenModel
from subtoken_train.types import Region

from reference import recompute
from truth_cells import backbone_of, compression_of, decoded
from truth_models import CONTEXT, prompts

CELL = {
    "family": "llava_gqa",
    "reducer": "fastv_embeds",
    "selector": "linear",
    "layout": "contiguous",
    "groups": "8/3",
    "budget": "per_token",
    "eviction": "own_sets",
    "batch": "three_left",
    "precision": "fp32",
}
PLAIN = {"reducer": "none", "selector": "none", "eviction": "none"}


def model_of(**levels: str) -> SubTokenModel:
    cell = CELL | levels
    if cell["family"] == "llama" and cell["reducer"] != "none":
        cell["reducer"] = "quest"
    backbone = backbone_of(cell)
    return SubTokenModel(backbone, compression_of(cell))


def inputs_of(model: SubTokenModel, kind: str = "three", pad_left: bool = True) -> dict:
    """What a processor would return."""
    family = model.backbone.family
    batch = prompts(family, kind, pad_left)
    inputs = {"input_ids": batch.input_ids_BN, "attention_mask": (batch.regions_BN != Region.PADDING).long()}
    if batch.pixel_values is not None:
        inputs["pixel_values"] = batch.pixel_values
    if batch.image_grid_I3 is not None:
        inputs["image_grid_thw"] = batch.image_grid_I3
        inputs["mm_token_type_ids"] = (batch.input_ids_BN == family.image_token_id).int()
    return inputs


def settings_of(model: SubTokenModel) -> dict:
    settings = {"pad_token_id": model.tokenizer.pad_token_id}
    return settings | ({"context_length": CONTEXT} if model.backbone.family.image_token_id is None else {})


@pytest.mark.parametrize("pad_left", [True, False])
@pytest.mark.parametrize("levels", [{}, PLAIN, {"eviction": "shared_set", "precision": "int8"}])
@pytest.mark.parametrize("family", ["llava_gqa", "qwen2_5_vl", "llama"])
def test_generate_equals_generate_greedy(family, levels, pad_left):
    model = model_of(family=family, **levels)
    inputs = inputs_of(model, pad_left=pad_left)
    out = model.generate(**inputs, **settings_of(model), max_new_tokens=10, do_sample=False)
    assert torch.equal(out[:, : inputs["input_ids"].shape[1]], inputs["input_ids"])
    expected = generate_greedy(model.backbone, model.last.batch, 10, model.compression).token_ids_BT
    assert torch.equal(out[:, inputs["input_ids"].shape[1] :], expected)


@pytest.mark.parametrize("returned", [1, 2])
@pytest.mark.parametrize("family", ["llava_gqa", "qwen2_5_vl", "llama"])
def test_beams_without_compression_are_those_of_transformers(family, returned):
    model = model_of(family=family, **PLAIN)
    inputs = inputs_of(model)
    settings = {"num_beams": 3, "num_return_sequences": returned, "pad_token_id": model.tokenizer.pad_token_id}
    expected = model.backbone.model.generate(**inputs, max_new_tokens=8, do_sample=False, **settings)
    got = model.generate(**inputs, **(settings_of(model) | settings), max_new_tokens=8, do_sample=False)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("family", ["llava_gqa", "qwen2_5_vl", "llama"])
def test_beams_of_a_compressed_prompt_run(family):
    model = model_of(family=family)
    out = model.generate(
        **inputs_of(model), **settings_of(model), max_new_tokens=6, num_beams=3, num_return_sequences=3, do_sample=False
    )
    assert out.shape[0] == 9
    assert model.last.cache.get_seq_length() == out.shape[1] - 1


def test_samples_are_those_of_transformers():
    model = model_of(**PLAIN)
    inputs, draw = inputs_of(model), {"max_new_tokens": 8, "do_sample": True, "num_return_sequences": 2, "top_k": 5}
    torch.manual_seed(3)
    expected = model.backbone.model.generate(**inputs, **draw)
    torch.manual_seed(3)
    assert torch.equal(model.generate(**inputs, **draw), expected)


@pytest.mark.parametrize("eviction", ["none", "own_sets"])
@pytest.mark.parametrize("family", ["llava_gqa", "qwen2_5_vl", "llama"])
def test_a_second_turn_equals_decoding_it_token_by_token(family, eviction):
    """The first answer and the next question are appended in full, causally."""
    model = model_of(family=family, eviction=eviction)
    inputs = inputs_of(model)
    first = model.generate(**inputs, **settings_of(model), max_new_tokens=5, do_sample=False)
    batch, length = model.last.batch, inputs["input_ids"].shape[1]
    turn = torch.cat([first, torch.randint(10, 60, (3, 6), generator=torch.Generator().manual_seed(1))], 1)
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, turn.shape[1] - length), value=1)
    second = model.generate(
        input_ids=turn,
        attention_mask=mask,
        past_key_values=model.last.cache,
        max_new_tokens=5,
        do_sample=False,
        pad_token_id=model.tokenizer.pad_token_id,
    )
    assert model.last.prefill_seconds == 0
    assert torch.equal(second[:, : turn.shape[1]], turn)
    assert model.last.decode_seconds > 0

    run = decoded(model.backbone, batch, 1, model.compression)
    for sample, truth in enumerate(run.truths):
        answer, start = second[sample, length:], turn.shape[1] - length
        expected = recompute(model.backbone, truth, answer)[start:-1].argmax(-1)
        ends = (expected == model.tokenizer.eos_token_id).nonzero().flatten().tolist() or [len(expected)]
        count = ends[0] + 1  # padding after the end
        assert torch.equal(expected[:count], answer[start:][:count])


class Streamed(BaseStreamer):
    def __init__(self) -> None:
        self.tokens, self.ended = [], False

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.ended = True


def test_streamer_and_stopping_criteria():
    model = model_of()
    inputs, streamer = inputs_of(model, "one"), Streamed()
    length = inputs["input_ids"].shape[1]
    out = model.generate(**inputs, max_new_tokens=8, do_sample=False, streamer=streamer)
    assert streamer.tokens == out[0].tolist()
    assert streamer.ended
    wanted = int(out[0, length + 1])
    stops = StoppingCriteriaList([lambda ids, _: torch.tensor([int(ids[0, -1]) == wanted])])
    stopped = model.generate(**inputs, max_new_tokens=8, do_sample=False, stopping_criteria=stops)
    assert stopped.shape[1] == length + 1 + out[0, length:].tolist().index(wanted)


def test_faults_leave_a_model_that_serves_the_next_call():
    model = model_of()
    with pytest.raises(ValueError, match="nothing was generated yet"):
        model.cache_report()
    inputs = inputs_of(model, "one")
    good = model.generate(**inputs, max_new_tokens=3, do_sample=False)
    with pytest.raises(ValueError, match="no pixel_values"):
        model.generate(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], max_new_tokens=3)
    assert torch.equal(model.generate(**inputs, max_new_tokens=3, do_sample=False), good)
    old = model.last.cache
    model.generate(**inputs, max_new_tokens=3, do_sample=False)
    with pytest.raises(ValueError, match=r"must be last\.cache"):
        model.generate(input_ids=good, past_key_values=old, max_new_tokens=3)
    with_image = torch.cat([good, inputs["input_ids"]], 1)
    with pytest.raises(ValueError, match="hold an image"):
        model.generate(input_ids=with_image, past_key_values=model.last.cache, max_new_tokens=3, do_sample=False)
    assert torch.equal(model.generate(**inputs, max_new_tokens=3, do_sample=False), good)


def test_padded_later_turns_are_refused():
    model = model_of()
    inputs = inputs_of(model)
    out = model.generate(**inputs, max_new_tokens=3, do_sample=False)
    turn = torch.cat([out, torch.full((3, 2), 11)], 1)
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 5), value=1)
    for place in (-1, -5):  # a shorter turn; a shorter answer before it
        padded = mask.clone()
        padded[0, place] = 0
        with pytest.raises(ValueError, match="are padded"):
            model.generate(input_ids=turn, attention_mask=padded, past_key_values=model.last.cache, max_new_tokens=2)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"use_cache": False}, "use_cache=False does not go with a compressed cache"),
        ({"output_attentions": True}, "output_attentions=True does not go"),
        ({"generation_config": GenerationConfig(output_hidden_states=True)}, "output_hidden_states=True does not go"),
        ({"prefill_chunk_size": 4}, "4 tokens were run first of prompts of"),
        (
            {"prompt_lookup_num_tokens": 3, "max_new_tokens": 8},
            "prompt_lookup_num_tokens: assisted decoding does not go",
        ),
    ],
)
def test_what_a_packed_cache_has_no_answer_to_is_refused(settings, words):
    model = model_of()
    inputs = inputs_of(model, "one")
    with pytest.raises(ValueError, match=words):
        model.generate(**inputs, **settings)
    assert model.generate(**inputs, max_new_tokens=2, do_sample=False).shape[1] == inputs["input_ids"].shape[1] + 2


def test_a_generated_image_token_is_a_token_like_others():
    model = model_of()
    inputs = inputs_of(model, "one")
    image = model.backbone.family.image_token_id
    forced = torch.cat([inputs["input_ids"], torch.tensor([[image]])], 1)
    model.generate(**inputs, max_new_tokens=1, do_sample=False)
    out = model.generate(input_ids=forced, past_key_values=model.last.cache, max_new_tokens=2, do_sample=False)
    assert out.shape[1] == forced.shape[1] + 2
