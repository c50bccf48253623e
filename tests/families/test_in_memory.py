"""A model and a processor that are in memory: what is served, what is refused, and that nothing of them is changed."""

import gc

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM

from checkpoints.tiny_llama import build_tokenizer
from checkpoints.tiny_llava import build_model, build_processor
from subtoken_train import SubTokenModel
from subtoken_train.errors import SubTokenWarning
from subtoken_train.families.in_memory import family_in_memory
from subtoken_train.reducers import build_reducer
from tests.support.refusals import refuses
from tests.support.sampling import sampled
from tests.support.text_families import text_family
from tests.support.tiny.llava import next_family
from tests.support.truth_models import FAMILIES, TINY

TEXT = "the bee and the spider met in the garden . "
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")


def parts_of(model: torch.nn.Module) -> dict[str, object]:
    """What somebody could leave on a model: attributes, hooks, modes, gradients, its attention."""
    found: dict[str, object] = {"attention": model.config.to_dict() | {"kind": model.config._attn_implementation}}
    for name, part in model.named_modules():
        own = {key for key, value in vars(part).items() if value is not None}
        found[name] = (own, part.training, type(part).forward, *(len(vars(part)[hooks]) for hooks in HOOKS))
        if (config := getattr(part, "config", None)) is not None:
            found[f"{name} attention"] = config._attn_implementation
    found["gradients"] = [weight.requires_grad for weight in model.parameters()]
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_found_by_its_model(name):
    built = TINY[name].build()
    found = family_in_memory(built.model, built.processor)
    assert type(found) is type(built)
    assert found.model is built.model


@sampled("reducer", ["none", "compactor"], every=2)
def test_a_language_model_is_as_it_was(reducer):
    """Bit for bit, before, beside and after; ``compactor`` splits attention, which the constructor prepares."""
    family = text_family("llama", max_position_embeddings=256)
    bare, tokenizer = family.model, family.tokenizer
    encoded = tokenizer(TEXT * 6, return_tensors="pt")
    inputs = {name: encoded[name] for name in ("input_ids", "attention_mask")}
    settings = {"max_new_tokens": 6, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}

    def logits() -> torch.Tensor:
        return torch.stack(bare.generate(**inputs, **settings, pad_token_id=0).logits)

    before, parts = logits(), parts_of(bare)
    own = None if reducer == "none" else build_reducer(reducer, keep_ratio=0.5, sinks=1, last=1)
    model = SubTokenModel(bare, tokenizer, reducer=own, eviction="knorm", eviction_keep=0.5)
    assert parts_of(bare) == parts
    model.generate(**inputs, max_new_tokens=6, context_length=40, pad_token_id=0)
    assert model.cache_report().realised_fraction <= 0.5
    model.ask(TEXT * 6, [TEXT, "the bee"], max_new_tokens=4)
    refuses("max_new_tokens", model.ask, TEXT, [TEXT], max_new_tokens=0)
    with pytest.warns(SubTokenWarning, match="longer than the 256 positions"):
        model.ask(TEXT, [TEXT * 60], max_new_tokens=2)
    assert parts_of(bare) == parts
    assert torch.equal(logits(), before)
    del model
    gc.collect()
    assert parts_of(bare) == parts
    assert torch.equal(logits(), before)


def test_a_model_that_sees_images_is_as_it_was():
    torch.manual_seed(0)
    bare, processor = build_model(text_layers=3).eval(), build_processor()
    ids = torch.cat([torch.tensor([[1, 20]]), torch.full((1, 64), 4), torch.tensor([[21, 22, 23]])], 1)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": torch.randn(1, 3, 96, 96)}
    before, parts = bare(**inputs).logits, parts_of(bare)
    model = SubTokenModel(bare, processor, reducer=build_reducer("fastv", 0.25), eviction="snapkv", eviction_keep=0.5)
    model.generate(**inputs, max_new_tokens=4)
    assert model.cache_report().realised_fraction == 0.125
    assert parts_of(bare) == parts
    assert torch.equal(bare(**inputs).logits, before)


def dropping():
    model = text_family().model
    model.model.layers[1].train()
    return model


def with_lora(wrapped: bool):
    model = text_family().model
    made = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))  # changes the model itself, too
    return made if wrapped else model


def of_class(name: str, **own: str):
    model = text_family().model
    model.__class__ = type(name, (LlamaForCausalLM,), own)
    return model


def with_attention(name: str):
    model = text_family().model
    model.config._attn_implementation = name
    return model


def unknown():
    return GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=1, vocab_size=90)).eval()


CODE = {"__module__": "transformers_modules.somebody.modeling"}

MODELS = {
    "a name": (lambda: "meta-llama/Llama-3.1-8B", "model is a str, not a model of transformers"),
    "a module": (lambda: torch.nn.Linear(2, 2).eval(), "model is a Linear, not a model of transformers"),
    "no head": (lambda: text_family().model.model, "model is a LlamaModel; llama is supported as LlamaForCausalLM"),
    "unknown": (unknown, r"gpt2 \(GPT2LMHeadModel\) is not supported: its decoder \(model.model\) has no layers"),
    "remote code": (lambda: of_class("OwnLlama", **CODE), r"OwnLlama runs code of its own \(trust_remote_code\)"),
    "own class": (lambda: of_class("MyLlama"), "model is a MyLlama; llama is supported as LlamaForCausalLM"),
    "peft": (lambda: with_lora(True), r"wrapped by peft.*merge_and_unload\(\)"),
    "peft inside": (lambda: with_lora(False), r"wrapped by peft.*merge_and_unload\(\)"),
    "training": (lambda: text_family().model.train(True), r"LlamaForCausalLM is in training mode.*model\.eval\(\)"),
    "training inside": (dropping, "in training mode"),
    "no weights": (lambda: text_family().model.to("meta"), r"has no weights \(device meta\)"),
    "float64": (lambda: text_family().model.to(torch.float64), "in float64; allowed: float32, bfloat16, float16"),
    "compiled": (lambda: torch.compile(text_family().model), "model is an OptimizedModule, not a model"),
    "eager": (lambda: with_attention("eager"), r"attention 'eager' cannot read a packed cache; load .* sdpa"),
}


@pytest.mark.parametrize(("make", "words"), MODELS.values(), ids=MODELS)
def test_models_that_are_refused(make, words):
    assert len(refuses(words, SubTokenModel, make(), build_processor().tokenizer)) < 400


def other_token():
    processor = build_processor()
    processor.image_token = "bee"
    return processor


PROCESSORS = {
    "none": (text_family, None, "processor is a NoneType; a language model needs its tokenizer"),
    "a name": (text_family, "meta-llama", "processor is a str; a language model needs its tokenizer"),
    "a whole processor": (text_family, build_processor, "is a LlavaProcessor; a language model needs its tokenizer"),
    "a larger vocabulary": (text_family, build_tokenizer, r"writes tokens up to \d+ and the model knows 90"),
    "a tokenizer": (next_family, build_tokenizer, "llava_next sees images and needs its whole processor"),
    "another placeholder": (None, other_token, r"image token 'bee' is \d+, and the model reads token 4"),
}


@pytest.mark.parametrize(("family", "processor", "words"), PROCESSORS.values(), ids=PROCESSORS)
def test_processors_that_do_not_fit(family, processor, words):
    model = build_model(text_layers=1).eval() if family is None else family().model
    refuses(words, lambda: SubTokenModel(model, processor() if callable(processor) else processor))
