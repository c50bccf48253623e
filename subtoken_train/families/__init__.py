"""Backbone families, a file each with all that is known of it; loading, quantisation and LoRA."""

import logging
from typing import TYPE_CHECKING

from subtoken_train.registry import Registry

if TYPE_CHECKING:
    from subtoken_train.families.family import Family


# bitsandbytes, where it is installed, misses an optional package for CPUs aloud when peft imports it
_backend_log = logging.getLogger("bitsandbytes.backends.cpu.ops")
_backend_log.addFilter(lambda record: "from kernels-community" not in record.getMessage())

FAMILIES: "Registry[Family]" = Registry(
    "backbone family (model_type)",
    group="subtoken_train.families",
    package=__name__,
    base="family:Family",
    builtin={
        "llava": "llava:LlavaFamily",
        "qwen2_vl": "qwen_vl:Qwen2VLFamily",
        "llava_next": "llava:LlavaNextFamily",
        "llava_onevision": "llava_onevision:LlavaOnevisionFamily",
        "qwen2_5_vl": "qwen_vl:Qwen25VLFamily",
        "qwen3_vl": "qwen_vl:Qwen3VLFamily",
        "qwen3_vl_moe": "qwen_vl:Qwen3VLMoeFamily",
        "internvl": "internvl:InternVLFamily",
        "idefics3": "idefics3:Idefics3Family",
        "smolvlm": "idefics3:SmolVLMFamily",
        "mistral3": "mistral3:Mistral3Family",
        "glm4v": "qwen_vl:Glm4vFamily",
        "glm4v_moe": "qwen_vl:Glm4vMoeFamily",
        **dict.fromkeys(("llama", "qwen2", "qwen3", "mistral"), "text:TextFamily"),
    },
)
