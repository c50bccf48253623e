"""What a harness says of the model and of an answer: ``model_args``, as a model, and generation settings, for greedy.

``model_args`` are ``adapter=DIR,eviction=snapkv,eviction_keep=0.1``.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from subtoken_train.artifact.config import read_config
from subtoken_train.artifact.identity import adapter_digest
from subtoken_train.artifact.source import adapter_folder
from subtoken_train.errors import check_word, unknown_name
from subtoken_train.families.backbone_config import BackboneConfig
from subtoken_train.inference.arm_spec import ARM_OPTIONS, ArmSpec
from subtoken_train.inference.compression import SWITCHES, parse_settings
from subtoken_train.inference.model import SubTokenModel

LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""What harnesses call the cap on an answer; the first one given counts, as in lm-evaluation-harness."""
OF_SAMPLERS = ("top_p", "top_k", "temperature", "do_sample")
"""Without effect where nothing is sampled."""
UNOFFERED = ("name", "reducer_options", "selector", "seed")
"""Options of an arm that only grids have."""


@dataclass(frozen=True)
class ModelArguments(ArmSpec):
    """What a harness's command line says of the model: an arm's options, and these.

    ``eviction_options`` are written ``key=value``, separated by ``;``. A reducer is for a backbone alone.

    Attributes:
        revision: branch, tag or commit of a Hub id.
        dtype: of the backbone's weights; None: the adapter's own, float32 for a backbone alone.
        context: language models, what may be compressed. ``auto``: the prompt up to its last blank line, else all but
            its last 64 tokens; a number N: all but its last N tokens.
        batch_size: prompts run together.
        device: ``auto``: the first GPU where there is one.
    """

    revision: str | None = None
    dtype: str | None = None
    context: str = "auto"
    batch_size: str = "1"
    device: str = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.context != "auto":
            _whole("context", self.context, "auto, or the number of last prompt tokens that are not compressed")
        _whole("batch_size", self.batch_size, "the number of prompts run together (automatic sizes are not offered)")

    @property
    def query_tokens(self) -> int | None:
        """Last prompt tokens that are not compressed; None: by ``auto``."""
        return None if self.context == "auto" else int(self.context)

    @property
    def prompts_together(self) -> int:
        """``batch_size`` as a number."""
        return int(self.batch_size)

    @property
    def settings(self) -> dict[str, Any]:
        """What differs from the defaults, and what the adapter holds, for result files."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "written"}
        given = {name: value for name, value in values.items() if value != getattr(ModelArguments, name, {})}
        if self.eviction_options:
            given["eviction_options"] = ";".join(f"{name}={value}" for name, value in self.eviction_options.items())
        if self.adapter:
            given["adapter_sha256"] = adapter_digest(adapter_folder(self.adapter, self.revision))
        return given

    def model(self) -> SubTokenModel:
        """The model, in evaluation mode on ``device``; see ``load`` for the errors."""
        config = None
        if self.dtype is not None and not self.adapter:
            config = BackboneConfig(dtype=self.dtype)
        elif self.dtype is not None:
            own = read_config(adapter_folder(str(self.adapter), self.revision)).backbone
            moved = own if self.backbone is None else replace(own, path=self.backbone, revision=None)
            config = replace(moved, dtype=self.dtype)
        return self.load(self.device, self.revision, config)


def read_arguments(given: Mapping[str, Any], unavailable: Collection[str] = ()) -> ModelArguments:
    """Check the arguments of a harness, whose parser may have made numbers of some.

    Args:
        given: by name; None is what was not given.
        unavailable: names that this harness has no use for.

    Raises:
        ValueError: an unknown name, a value that is not allowed, or one that needs another which is missing.
    """
    known = [*ARM_OPTIONS, *ModelArguments.__annotations__]
    known = [name for name in known if name not in (*UNOFFERED, *unavailable)]
    texts: dict[str, Any] = {name: str(value) for name, value in given.items() if value is not None}
    for name in texts:
        if name not in known:
            raise unknown_name("model argument", name, known)
    for name in {"keep_ratio", "key_channels"} & set(texts):
        texts[name] = _number(name, texts[name])
    if (chunk := texts.get("prefill_chunk")) is not None:
        _whole("prefill_chunk", chunk, "rows of a prompt that run at a time")
        texts["prefill_chunk"] = int(chunk)
    if (rerotate := texts.get("rerotate")) is not None:
        check_word("value of rerotate", rerotate.lower(), SWITCHES)
        texts["rerotate"] = SWITCHES[rerotate.lower()]
    if (every := texts.get("eviction_every")) is not None:
        texts["eviction_every"] = _whole("eviction_every", every, "generated tokens between two evictions")
    if (options := texts.get("eviction_options")) is not None:
        texts["eviction_options"] = parse_settings(texts.get("eviction"), options.split(";"))
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(
            "started in several processes, each of which would answer everything; start one, or use "
            "subtoken-train evaluate, which divides the samples"
        )
    return ModelArguments(**texts, written="argument")


def _whole(name: str, text: str, meaning: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{name}={text} must be a whole number of at least 1: {meaning}")
    return int(text)


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{name}={text} must be a number, for instance 0.25") from None


@dataclass(frozen=True)
class GreedySettings:
    """Cap on an answer, in tokens, and the texts that end it (they are cut off)."""

    max_new_tokens: int
    stop: tuple[str, ...]


def greedy_settings(given: Mapping[str, Any], default_length: int, ignored: Collection[str] = ()) -> GreedySettings:
    """Read the settings of one request.

    Args:
        given: the harness's generation keyword arguments.
        default_length: tokens of an answer where they name none.
        ignored: further settings that mean nothing here.

    Raises:
        ValueError: sampling, beams, or a setting that greedy decoding does not know.
    """
    temperature = float(given.get("temperature") or 0)
    samples = given.get("do_sample")
    if samples or (samples is None and temperature > 0):
        raise ValueError(
            f"do_sample={samples}, temperature={temperature:g}: answers are greedy; ask for do_sample=false (in "
            "lm-eval: --gen_kwargs do_sample=false)"
        )
    if int(given.get("num_beams") or 1) > 1:
        raise ValueError(f"num_beams={given['num_beams']}: answers are greedy, leave beams out")
    for name, value in given.items():
        if name not in (*LENGTHS, *OF_SAMPLERS, *ignored, "until", "num_beams") and value is not None:
            raise ValueError(f"generation setting {name}={value!r} does not go with greedy decoding; leave it out")
    lengths = [int(given[name]) for name in LENGTHS if given.get(name) is not None]
    length = lengths[0] if lengths else default_length
    if length < 1:
        raise ValueError(f"an answer of {length} tokens was asked for; it must be at least 1")
    until = given.get("until") or ()
    texts = [until] if isinstance(until, str) else list(until)
    return GreedySettings(length, tuple(text for text in texts if text))
