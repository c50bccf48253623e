"""Load a backbone from a folder or the Hub, on one device or several, or lay out its architecture without weights.

Several GPUs serve prompts only: transformers puts whole layers on each, and a layer's cache, router and view lie with
it; prompts, positions, the plan and hidden states between layers lie with the token embeddings. Tests run it on
pretended devices; it has not been run on several real GPUs.
"""

import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoConfig, GgufConfig
from transformers.integrations import deepspeed
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from subtoken_train.errors import refuse
from subtoken_train.families import FAMILIES
from subtoken_train.families import backbone_files as files
from subtoken_train.families.backbone_config import BackboneConfig, check_backbone, is_gguf, is_hub_id, nowhere, resolve
from subtoken_train.families.decoder import check_window_runs, layer_windows
from subtoken_train.families.family import Family, check_served
from subtoken_train.families.lora import prepare_quantised, quantization_config
from subtoken_train.families.online import hub_asked, silence
from subtoken_train.families.proof import check_structure, prove
from subtoken_train.families.text import TextFamily
from subtoken_train.forks import changed
from subtoken_train.reducers.base import Reducer

WEIGHTS = 0.7  # share of a GPU's free memory that weights may take; the rest is for caches and activations
BYTES = {"nf4": 0.53, "int8": 1.01}  # bytes of a quantised weight, its scales included
_REPORTED: dict[str, Any] = {"ignore_mismatched_sizes": True, "output_loading_info": True}  # read by ``check_report``


def spread_memory(layout: Family, config: BackboneConfig, free: Sequence[int]) -> dict[int, int] | None:
    """Return the bytes of weights that each GPU may take, from their free ones; None if the first one holds all."""
    gib = 2**30
    inside = {id(part.weight) for part in layout.decoder.modules() if isinstance(part, torch.nn.Linear)}
    quantised = BYTES.get(config.quantization)
    each = (
        part.numel() * (part.element_size() if quantised is None or id(part) not in inside else quantised)
        for part in layout.model.parameters()
    )
    needed, room = int(sum(each)), [int(WEIGHTS * bytes_) for bytes_ in free]
    if len(room) < 2 or needed <= room[0]:
        return None
    if needed > sum(room):
        room_words = f"{len(room)} GPUs have room for {sum(room) / gib:.1f} ({WEIGHTS:.0%} of their free memory)"
        raise ValueError(f"backbone {config.path!r} would take {needed / gib:.1f} GiB, and {room_words}; use nf4")
    return dict(enumerate(room))


def free_memory() -> list[int]:
    """Return the free bytes of every GPU of this machine."""
    return [torch.cuda.mem_get_info(i)[0] for i in range(torch.cuda.device_count())]


def machine_memory() -> int:
    """Return the bytes of memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def check_room(config: BackboneConfig) -> None:
    """Raise ``ValueError`` where weights take more than the memory of a machine without a GPU; none is read."""
    folder, gib = Path(resolve(config.path)), 2**30
    if torch.cuda.is_available() or is_gguf(config.path):
        return
    weights = files.read_headers(folder).values() if folder.is_dir() else layout_family(config).model.parameters()
    each = BYTES.get(config.quantization, getattr(torch, config.dtype).itemsize)
    needed, room = int(each * sum(weight.numel() for weight in weights)), machine_memory()
    words = f"the weights of backbone {config.path!r} take {needed / gib:.1f} GiB in {config.dtype}"
    here = f"this machine has {room / gib:.1f} GiB of memory and no GPU"
    refuse((needed > room, f"{words}, and {here}; take bfloat16, or a smaller model: subtoken-train data smollm2"))


def is_spread(model: Any) -> bool:
    """Return whether a model's parts lie on several devices."""
    return len(set(getattr(model, "hf_device_map", {}).values())) > 1


def check_whole(model: Any, path: str) -> None:
    """Raise ``ValueError`` if accelerate left weights on the CPU or on disk."""
    if left := sorted(name for name, place in getattr(model, "hf_device_map", {}).items() if place in ("cpu", "disk")):
        raise ValueError(f"{path!r}: {len(left)} parts do not fit on the GPUs (first {left[0]}); that is not supported")


def check_on_one_device(model: Any, what: str) -> None:
    """Raise ``ValueError`` if a model is spread and ``what`` needs it on one device."""
    instead = "name a device (cuda:0), quantise the backbone, or train with fsdp2 or deepspeed"
    refuse((is_spread(model), f"{what} needs a backbone on one device, and this one is spread over several; {instead}"))


def load_family(config: BackboneConfig, reducer: Reducer | None = None, memory: dict[int, int] | None = None) -> Family:
    """Load weights and processor, on one device or by ``spread_memory``, and check that a reducer serves them."""
    check_backbone(config)
    model_config = _read_config(config)
    family = _family_of(model_config, config)
    if reducer is not None:
        check_served(reducer, family, model_config)
    loaded = _put_together(family, load_weights(family, config, memory), _read_processor(family, config), config)
    if model_config.model_type not in FAMILIES:
        prove(loaded)
    return loaded


def load_weights(family: type[Family], config: BackboneConfig, memory: dict[int, int] | None = None) -> Any:
    """Load the model alone, frozen, in evaluation mode, quantised if asked for."""
    model_config = check_weights(family, config)
    check_room(config)
    quantised = quantization_config(config.quantization, getattr(torch, config.dtype), family.unquantised)
    from_gguf = GgufConfig(dequantize=True) if is_gguf(config.path) else None
    if config.attention == "flash_attention_2" and find_spec("flash_attn") is None:
        raise ValueError("attention flash_attention_2 needs flash-attn, which is not installed; sdpa needs none")
    with _reading("the weights", config), _files(config) as (source, further):
        how = {"attn_implementation": config.attention, "quantization_config": quantised or from_gguf, **_REPORTED}
        how |= {} if memory is None else {"device_map": "auto", "max_memory": memory}
        how |= {"dtype": getattr(torch, config.dtype), "trust_remote_code": False, "use_safetensors": True, **further}
        model, report = family.auto_model.from_pretrained(source, config=model_config, **how)
    if from_gguf is not None:
        model.config.name_or_path = config.path
    check_whole(model, config.path)
    files.check_report(report, model, config.path)
    files.check_finite_weights(model, config.path)
    if quantised is not None:
        prepare_quantised(model, family(model, None).decoder)
    return model.eval()


def check_weights(family: type[Family], config: BackboneConfig) -> Any:
    """Return the configuration; check that a folder's weights are whole and fit it, by their headers."""
    model_config, folder = _read_config(config), Path(resolve(config.path))
    if not folder.is_dir():
        return model_config
    with _reading("the weights", config):
        headers = files.read_headers(folder)
    if getattr(model_config, "quantization_config", None) is None:  # or tensors have shapes of their own
        # nothing is laid out on the meta device while transformers knows of a ZeRO-3 run
        outside = changed(deepspeed, _hf_deepspeed_config_weak_ref=None)
        with _reading("the configuration", config), outside, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of sizes that are nothing, which do not fit the weights
            kind, own = family.auto_model._model_mapping[type(model_config)], deepcopy(model_config)
            how = {"dtype": getattr(torch, config.dtype), "device_map": {"": "meta"}, **_REPORTED}
            model, report = kind.from_pretrained(None, config=own, state_dict=headers, **how)
        files.check_report(report, model, config.path)
        for name, tensor in sorted(headers.items()):
            if name.endswith((".weight", ".bias")) and not tensor.is_floating_point():
                kind = str(tensor.dtype).removeprefix("torch.")
                words = f"{name[:120]} is of type {kind}, but its config.json names no quantisation"
                raise ValueError(f"the weights of backbone {config.path!r} are not usable: {words}")
    return model_config


def layout_family(
    config: BackboneConfig, change: Callable[[Any], None] | None = None, device: str | torch.device = "meta"
) -> Family:
    """Lay out a backbone without weights (at random on other devices than ``meta``), its configuration changed."""
    model_config, family = _known(config)
    if change is not None:
        change(model_config)
    laid_out = _put_together(family, _lay_out(family, model_config, config, device), None, config)
    # as it will be; from_config would ask for flash attention's package
    laid_out.decoder.config._attn_implementation = config.attention
    return laid_out


def _lay_out(
    family: type[Family], model_config: Any, config: BackboneConfig, device: str | torch.device = "meta"
) -> Any:
    with _reading("the configuration", config), torch.device(device):
        return family.auto_model.from_config(model_config, dtype=getattr(torch, config.dtype))


def family_class(config: BackboneConfig) -> type[Family]:
    """Return the family of a backbone, by its configuration alone."""
    return _known(config)[1]


def stored_dtype(config: BackboneConfig) -> str:
    """Return the dtype that a backbone's configuration names for its weights; float32 where it names none."""
    return str(_read_config(config).dtype or torch.float32).removeprefix("torch.")


def _known(config: BackboneConfig) -> tuple[Any, type[Family]]:
    check_backbone(config)
    model_config = published_config(config.path) or _read_config(config)
    return model_config, _family_of(model_config, config)


def with_processor(layout: Family, config: BackboneConfig) -> Family:
    """Return a layout that can encode records: the same with its tokenizer and image processor."""
    return _put_together(type(layout), layout.model, _read_processor(type(layout), config), config)


def published_config(name: str) -> Any | None:
    """Return the configuration of a Hub id that a family knows, without network; None for any other name."""
    if not is_hub_id(name):
        return None
    return next((family.published[name]() for family in FAMILIES.values() if name in family.published), None)


@contextmanager
def _files(config: BackboneConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    source = resolve(config.path)
    if is_gguf(source):
        with files.opened_gguf(Path(source)) as opened:
            yield opened
    else:
        with hub_asked() if is_hub_id(source) else nullcontext():
            yield source, {"revision": config.revision}


def _read_processor(family: type[Family], config: BackboneConfig) -> Any:
    with _reading("the tokenizer or processor", config), _files(config) as (source, further):
        return family.auto_processor.from_pretrained(source, **further, trust_remote_code=False)


@contextmanager
def _reading(what: str, config: BackboneConfig) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever the readers of broken files raise, or sizes that do not fit each other
        why = (silence() if is_hub_id(config.path) else None) or _words(error)
        raise ValueError(f"{what} of backbone {config.path!r} cannot be read: {why}") from error


def _put_together(family: type[Family], model: Any, processor: Any, config: BackboneConfig) -> Family:
    made: Any = family(model, processor)
    if config.max_pixels is not None:
        made.limit_pixels(config.max_pixels)
    if config.template is not None or config.system is not None:
        made.choose_chat(config.template, config.system)
    if config.image_aspect_ratio is not None:
        made.pad_images()
    return cast("Family", made)


_PYTHON_TYPE = re.compile(r"<class '(?:NoneType|([\w.]+))'>")


def _words(error: Exception) -> str:
    """Return a library's complaint about a file, without what only its authors understand."""
    if isinstance(error, UnicodeError):
        return "a text that is not UTF-8"
    if isinstance(error, TypeError | AttributeError | LookupError):
        return "a value in it is missing or has the wrong type"
    text = str(error).partition("Exception raised from")[0]  # torch adds where in its own code
    return _PYTHON_TYPE.sub(r"\1", " ".join(text.split())).replace("NoneType", "null")[:240] or type(error).__name__


def _read_config(config: BackboneConfig) -> Any:
    source = resolve(config.path)
    if is_gguf(source):
        files.check_gguf(Path(source))
    try:
        if Path(source).exists() and not is_gguf(source) and not (Path(source) / "config.json").is_file():
            raise FileNotFoundError(source)
        if Path(source).is_dir():
            files.check_local_files(Path(source))
        with _files(config) as (place, further):
            content = AutoConfig.from_pretrained(place, **further, trust_remote_code=False)
        files.check_format(vars(content))
        for name in ("text_config", "vision_config"):
            if isinstance(getattr(content, name, None), dict):
                raise ValueError(f"it has a {name}, but its model_type {content.model_type!r} has none; correct it")
        content._attn_implementation = None  # the recipe says it; a file could name a kernel, code that the Hub gives
        return content
    except OSError as error:
        why = (is_hub_id(source) and silence()) or f"check the name, the network or HF_HOME ({type(error).__name__})"
        neither = "is neither a folder with a config.json nor a model that the Hub returns"
        raise nowhere(config.path, neither, why) from error
    except Exception as error:  # no such model_type, or values that its configuration does not take
        words = _words(error)
        if "custom code" in words:
            words = "its code is its authors' own and is not run; use the model in transformers' format, or another"
        raise ValueError(f"the configuration of backbone {config.path!r} cannot be used: {words}") from error


_UNSERVED = ("gemma3", "gemma4", "gemma4_unified")  # refused by their name; what is wrong with others is seen


def named_family(model_type: str) -> type[Family]:
    """Return the family of a model type; ``TextFamily`` for a causal language model that has none of its own."""
    if model_type in _UNSERVED:
        raise ValueError(f"{model_type} is not supported: tokens of an image attend in both ways; use gemma3_text")
    if model_type not in FAMILIES and model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return TextFamily
    return FAMILIES.find(model_type)


def _family_of(model_config: Any, config: BackboneConfig) -> type[Family]:
    family = named_family(model_config.model_type)
    # before any weight is read
    check_window_runs(layer_windows(model_config, family.tower_positions == "mrope"), config.attention)
    if model_config.model_type not in FAMILIES:
        check_structure(_lay_out(family, deepcopy(model_config), config))
    for setting, allowed, why in (
        ("template", family.chooses_chat, "has one chat format"),
        ("system", family.chooses_chat, "has one chat format"),
        ("image_aspect_ratio", family.may_pad, "shows images in one way"),
    ):
        if (value := getattr(config, setting)) is not None and not allowed:
            raise ValueError(f"{setting}={value!r}: {family.name} {why}; remove {setting}")
    return family
