"""A family around a transformers model and a processor that somebody has loaded already; neither is changed."""

from typing import Any

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from subtoken_train.families import FAMILIES
from subtoken_train.families.backbone_config import DTYPES
from subtoken_train.families.backbone_files import check_finite_weights
from subtoken_train.families.family import Family
from subtoken_train.families.load import check_whole, named_family
from subtoken_train.families.proof import check_structure, prove

_LOADED = "load it by SubTokenModel.from_pretrained"


def family_in_memory(model: Any, processor: Any) -> Family:
    """Return the family of a transformers model, and the processor (or tokenizer) that was published with it."""
    family, name = _served(model), type(model).__name__
    if any(part.training for part in model.modules()):
        raise ValueError(f"the {name} is in training mode, where dropout acts; call model.eval() first")
    if getattr(model, "is_quantized", False):
        raise ValueError(f"the {name} is quantised; {_LOADED} with backbone=BackboneConfig(path, quantization='nf4')")
    if (dtype := str(model.dtype).removeprefix("torch.")) not in DTYPES:
        raise ValueError(f"the {name} is in {dtype}; allowed: {', '.join(DTYPES)}")
    path = str(model.config._name_or_path) or name
    check_whole(model, path)
    if any(weight.device.type == "meta" for weight in model.parameters()):
        raise ValueError(f"the {name} has no weights (device meta); load them first, with from_pretrained")
    check_finite_weights(model, path)
    _check_processor(family, model, processor)
    made = family(model, processor)
    if model.config.model_type not in FAMILIES:
        prove(made)
    return made


def _served(model: Any) -> type[Family]:
    if isinstance(model, PeftModel) or (
        isinstance(model, torch.nn.Module) and any(isinstance(part, BaseTunerLayer) for part in model.modules())
    ):
        raise ValueError(f"the model is wrapped by peft; merge it (peft_model.merge_and_unload()), or {_LOADED}")
    kind = type(model)
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"model is {_article(kind)}, not a model of transformers as from_pretrained returns it")
    if kind.__module__.partition(".")[0] == "transformers_modules":
        raise ValueError(f"the {kind.__name__} runs code of its own (trust_remote_code), which is not supported")
    family = named_family(model.config.model_type)
    wanted = family.auto_model._model_mapping.get(type(model.config), None)
    if kind is not wanted:
        named = "a class of transformers' own" if wanted is None else wanted.__name__
        raise ValueError(f"model is {_article(kind)}; {model.config.model_type} is supported as {named}")
    if model.config.model_type not in FAMILIES:
        check_structure(model)
    return family


def _check_processor(family: type[Family], model: Any, processor: Any) -> None:
    given = f"processor is {_article(type(processor))}"
    if not family.sees_images:
        if not isinstance(processor, PreTrainedTokenizerBase):
            raise ValueError(f"{given}; a language model needs its tokenizer (AutoTokenizer.from_pretrained)")
        tokenizer = processor
    else:
        parts = [getattr(processor, part, None) for part in ("tokenizer", "image_processor", "image_token")]
        if any(part is None for part in parts):
            raise ValueError(f"{given}; {family.name} sees images and needs its whole processor (AutoProcessor)")
        tokenizer, token, expected = processor.tokenizer, processor.image_token, int(model.config.image_token_id)
        if (found := tokenizer.convert_tokens_to_ids(token)) != expected:
            raise ValueError(f"the processor's image token {token!r} is {found}, and the model reads token {expected}")
    rows = model.get_input_embeddings().num_embeddings
    if (highest := max(tokenizer.get_vocab().values(), default=0)) >= rows:
        raise ValueError(f"the tokenizer writes tokens up to {highest} and the model knows {rows}; give its own one")


def _article(kind: type) -> str:
    return f"{'an' if kind.__name__[0] in 'AEIOU' else 'a'} {kind.__name__}"
