"""Requests of an evaluation harness on compressed caches: its arguments, its batches, and what compression kept."""

import os
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, Generic, NamedTuple, TypeVar

from lightning.fabric.utilities import move_data_to_device

from subtoken_train.artifact.folder import adapter_digest
from subtoken_train.artifact.hub import adapter_folder
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.errors import check_word, refuse
from subtoken_train.inference.arm_spec import ArmSpec
from subtoken_train.inference.batched import generate_batch, in_batches, score_batch
from subtoken_train.inference.cache_report import Outcome
from subtoken_train.inference.compression import Compression, parse_settings
from subtoken_train.inference.model import SubTokenModel
from subtoken_train.inference.prefill import who_drops
from subtoken_train.ledger.kv_budget import share_words
from subtoken_train.ledger.measure import emptied_words
from subtoken_train.settings import Setting, settings_of
from subtoken_train.typed import Written, written_as
from subtoken_train.types import Batch, Protocol, grouped


@dataclass(frozen=True)
class ModelArguments(ArmSpec):
    """Model of a harness's command line: an arm's settings, and some of its own.

    ``eviction_options`` are written ``key=value``, separated by ``;``. A reducer is for a backbone alone.
    ``context="auto"`` compresses a language model's prompt up to its last blank line, else all but its last 64 tokens.
    """

    revision: Annotated[str | None, Setting("branch, tag or commit of a Hub id")] = None
    context: Annotated[str, Setting("auto, or how many tokens at the end of a prompt are not compressed")] = "auto"
    batch_size: Annotated[str, Setting("number of prompts run together (automatic sizes are not supported)")] = "1"
    device: Annotated[str, Setting("auto (the first GPU, if any), cpu, cuda:0")] = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("context", "batch_size"):
            text, words = getattr(self, name), MODEL_SETTINGS[name].words
            whole = (text.isdecimal() and int(text) >= 1) or (name == "context" and text == "auto")
            refuse((not whole, f"{name}={text} must be a whole number of at least 1: {words}"))

    @property
    def query_tokens(self) -> int | None:
        """Last prompt tokens that are not compressed; None: by ``auto``."""
        return None if self.context == "auto" else int(self.context)

    @property
    def settings(self) -> dict[str, Any]:
        """Settings that differ from the defaults, and the adapter's digest, for result files."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "written"}
        given = {name: value for name, value in values.items() if value != getattr(ModelArguments, name, {})}
        if self.eviction_options:
            given["eviction_options"] = ";".join(f"{name}={value}" for name, value in self.eviction_options.items())
        if self.adapter:
            given["adapter_sha256"] = adapter_digest(adapter_folder(self.adapter, self.revision))
        return given

    def model(self) -> SubTokenModel:
        """Load the model in evaluation mode on ``device``."""
        return self.load(self.device, self.revision)


def read_arguments(given: Mapping[str, Any], unavailable: Collection[str] = ()) -> ModelArguments:
    """Check a harness's arguments, whose parser may have made numbers of some; ``unavailable``: of no use here."""
    known = [name for name, each in MODEL_SETTINGS.items() if each.harness and name not in unavailable]
    read: dict[str, Any] = {name: str(value) for name, value in given.items() if value is not None}
    for name, text in read.items():
        check_word("model argument", name, known)
        kind = MODEL_SETTINGS[name].kind  # a method's own settings stay a text
        if kind in (int, float, bool):
            read[name] = written_as(kind, Written(text.lower() if kind is bool else text), name)
    if (options := read.get("eviction_options")) is not None:
        read["eviction_options"] = parse_settings(read.get("eviction"), options.split(";"))
    several = "started in several processes, each of which would answer everything; start one, or use subtoken-train"
    refuse((int(os.environ.get("WORLD_SIZE", "1")) > 1, f"{several} evaluate, which divides the samples"))
    return ModelArguments(**read, written="argument")


MODEL_SETTINGS = settings_of(ModelArguments)


LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names that harnesses give the cap on an answer; the first one given counts, as in lm-evaluation-harness."""
OF_SAMPLERS = ("top_p", "top_k", "temperature", "do_sample")
"""Without effect where nothing is sampled."""


class GreedySettings(NamedTuple):
    """Cap on an answer, in tokens, and the texts that end it (they are cut off)."""

    max_new_tokens: int
    stop: tuple[str, ...]


def greedy_settings(given: Mapping[str, Any], default_length: int, ignored: Collection[str] = ()) -> GreedySettings:
    """Read the settings of one request; ``default_length`` tokens where they name none, ``ignored`` mean nothing."""
    temperature, samples, beams = float(given.get("temperature") or 0), given.get("do_sample"), given.get("num_beams")
    greedy = "answers are greedy; ask for do_sample=false (in lm-eval: --gen_kwargs do_sample=false)"
    drawn = samples or (samples is None and temperature > 0)
    lengths = [int(given[name]) for name in LENGTHS if given.get(name) is not None]
    length = lengths[0] if lengths else default_length
    read = (*LENGTHS, *OF_SAMPLERS, *ignored, "until", "num_beams")
    more = [f"{name}={value!r}" for name, value in given.items() if name not in read and value is not None]
    refuse(
        (drawn, f"do_sample={samples}, temperature={temperature:g}: {greedy}"),
        (int(beams or 1) > 1, f"num_beams={beams}: answers are greedy, leave beams out"),
        (more, f"generation setting {''.join(more[:1])} does not go with greedy decoding; leave it out"),
        (length < 1, f"an answer of {length} tokens was asked for; it must be at least 1"),
    )
    until = given.get("until") or ()
    return GreedySettings(length, tuple(text for text in ([until] if isinstance(until, str) else list(until)) if text))


SUMMED = ("kv_bytes", "dense_kv_bytes", "region_bytes", "region_dense_bytes", "entries_before", "entries_after")


class Counted:
    """Sums over prompts; a prompt with several continuations counts once."""

    def __init__(self, backbone: CompressedBackbone, compression: Compression, protocol: Protocol) -> None:
        self.backbone, self.compression, self.protocol = backbone, compression, protocol
        self.routing = None if backbone.active_routing is None else backbone.active_routing.words
        self.prompts, self.emptied = 0, list[dict[str, int]]()
        self.sums = dict.fromkeys(SUMMED, 0)

    def add(self, outcomes: Iterable[Outcome]) -> None:
        """Count prompts."""
        for outcome in outcomes:
            self.prompts += 1
            self.emptied.append(outcome.emptied)
            for name in SUMMED:
                self.sums[name] += getattr(outcome, name)

    @property
    def facts(self) -> dict[str, Any]:
        """JSON values for a results file; fractions are None where nothing could be compressed."""
        sums = self.sums
        return {
            "reducer": self.backbone.reducer.name,
            "keep_ratio": self.backbone.reducer.keep_ratio,
            "routing": self.routing,
            "compression": self.compression.label,
            "protocol": self.protocol,
            "prompts": self.prompts,
            "prompts_with_an_emptied_region": sum(map(bool, self.emptied)),
            **sums,
            **{
                f"{name}_fraction_measured": sums[part] / sums[whole] if sums[whole] else None
                for name, part, whole in (("kv", *SUMMED[:2]), ("region", *SUMMED[2:4]))
            },
        }

    def warning(self) -> str | None:
        """Warn where the settings cannot change what a harness scores."""
        if self.compression.eviction is None or self.protocol == "context_first":
            return None
        return (
            f"{self.compression.label} acts after the whole prompt was read: under protocol=query_aware it cannot "
            "change the first token after the prompt, and so no log-likelihood of one-token answers; "
            "protocol=context_first evicts before the question is read"
        )

    def __str__(self) -> str:
        sums, acting = self.sums, [self.backbone.reducer.name, self.routing, self.compression.label]
        lines = [f"subtoken: {self.prompts:,} prompts; {', '.join(filter(None, acting))}; protocol {self.protocol}"]
        if not self.prompts:
            return f"{lines[0]}\nno prompt was run (all answers came from a cache, or there were no requests)"
        entries = ("its entries, in any head", *SUMMED[5:3:-1], "(token, layer) pairs")
        region = [("compressed region", *SUMMED[2:4], "bytes"), entries] if sums["region_dense_bytes"] else []
        for what, kept, whole, unit in [("KV of the prompts", *SUMMED[:2], "bytes"), *region]:
            share = share_words(sums[kept] / sums[whole], 2)
            lines.append(f"{what}: {sums[kept]:,} of {sums[whole]:,} {unit} kept ({share})")
        if not region:
            lines.append("no prompt had anything that may be compressed (an image, or a context before its question)")
        dropping = who_drops(self.backbone.active_routing, self.compression.label)
        return "\n".join([*lines, *filter(None, [emptied_words(self.emptied, *dropping)])])


SHARED = 16
"""Continuations after one pass over their prompt, at most; they run one after another, and its batch waits for them."""
PromptT = TypeVar("PromptT", bound=Hashable)
Scored = tuple[float, bool]
"""Log-likelihood in nats, and whether greedy decoding gives the continuation."""


class Runner(Generic[PromptT]):
    """A loaded model, and what compression did to its prompts so far; a batch holds prompts of like ``length``."""

    def __init__(
        self,
        model: SubTokenModel,
        arguments: ModelArguments,
        collate: Callable[[Sequence[PromptT]], Batch],
        length: Callable[[PromptT], int],
    ) -> None:
        self.model, self.arguments, self.collate, self.length = model, arguments, collate, length
        self._how: dict[str, Any] = {"compression": model.compression, "protocol": arguments.protocol}
        self.counted = Counted(model.backbone, model.compression, arguments.protocol)

    def score(self, asks: Sequence[tuple[PromptT, Sequence[int]]], done: Callable[[int, Scored], None]) -> list[Scored]:
        """Return log-likelihoods of continuations; equal prompts share a pass; ``done`` gets index and outcome."""
        outcomes: list[Scored] = [(0.0, False)] * len(asks)
        by_prompt = grouped((prompt, i) for i, (prompt, _) in enumerate(asks))
        groups = [(prompt, part) for prompt, members in by_prompt.items() for part in in_batches(members, SHARED)]
        groups.sort(key=lambda group: -self.length(group[0]))
        for chunk in in_batches(groups, int(self.arguments.batch_size)):
            after = [[asks[i][1] for i in members] for _, members in chunk]
            prompts = move_data_to_device(self.collate([prompt for prompt, _ in chunk]), self.model.device)
            results = score_batch(self.model.backbone, prompts, after, **self._how)
            self.counted.add(results)
            for (_, members), result in zip(chunk, results, strict=True):
                for i, logprob, greedy in zip(members, result.logprobs, result.greedy, strict=True):
                    outcomes[i] = (logprob, greedy)
                    done(i, outcomes[i])
        return outcomes

    def generate(self, asks: Sequence[tuple[PromptT, GreedySettings]], done: Callable[[int, str], None]) -> list[str]:
        """Answer prompts greedily, without the texts that end them; ``done`` is called as in ``score``."""
        texts = [""] * len(asks)
        for settings, members in grouped((settings, i) for i, (_, settings) in enumerate(asks)).items():
            members.sort(key=lambda i: -self.length(asks[i][0]))
            for chunk in in_batches(members, int(self.arguments.batch_size)):
                prompts = move_data_to_device(self.collate([asks[i][0] for i in chunk]), self.model.device)
                results = generate_batch(self.model.backbone, prompts, **settings._asdict(), **self._how)
                self.counted.add(results)
                for i, result in zip(chunk, results, strict=True):
                    texts[i] = result.text
                    done(i, result.text)
        return texts
