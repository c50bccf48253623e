"""A harness's requests in batches on compressed caches, and what compression did to all prompts, for its output."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Generic, TypeVar

from lightning.fabric.utilities import move_data_to_device

from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.inference.batched import Outcome, generate_batch, score_batch
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.model import SubTokenModel
from subtoken_train.inference.opening import check_context_first
from subtoken_train.ledger.kv_budget import share_words
from subtoken_train.ledger.measure import emptied_words
from subtoken_train.plugins.arguments import GreedySettings, ModelArguments
from subtoken_train.types import Batch, Protocol

SHARED = 16
"""Continuations after one pass over their prompt, at most; they run one after another, and its batch waits for them."""
PromptT = TypeVar("PromptT", bound=Hashable)
Scored = tuple[float, bool]
"""Log-likelihood in nats, and whether greedy decoding gives the continuation."""
SUMMED = ("kv_bytes", "dense_kv_bytes", "region_bytes", "region_dense_bytes", "entries_before", "entries_after")


class Counted:
    """Sums over prompts; a prompt with several continuations counts once.

    Args:
        backbone: whose reducer and routers are at work.
        compression: eviction and precision.
        protocol: when the prompt is compressed.
    """

    def __init__(self, backbone: CompressedBackbone, compression: Compression, protocol: Protocol) -> None:
        self.backbone, self.compression, self.protocol = backbone, compression, protocol
        self.prompts = 0
        self.emptied: list[dict[str, int]] = []
        self.sums = dict.fromkeys(SUMMED, 0)

    def add(self, outcomes: Iterable[Outcome]) -> None:
        """Count the outcomes of prompts."""
        for outcome in outcomes:
            self.prompts += 1
            self.emptied.append(outcome.emptied)
            for name in SUMMED:
                self.sums[name] += getattr(outcome, name)

    @property
    def facts(self) -> dict[str, Any]:
        """JSON values for a results file; fractions are None where nothing could be compressed."""
        return {
            "reducer": self.backbone.reducer.name,
            "keep_ratio": self.backbone.reducer.keep_ratio,
            "routing": self.routing,
            "compression": self.compression.label,
            "protocol": self.protocol,
            "prompts": self.prompts,
            "prompts_with_an_emptied_region": sum(map(bool, self.emptied)),
            **self.sums,
            "kv_fraction_measured": _share(self.sums["kv_bytes"], self.sums["dense_kv_bytes"]),
            "region_fraction_measured": _share(self.sums["region_bytes"], self.sums["region_dense_bytes"]),
        }

    @property
    def routing(self) -> str | None:
        """``linear S=16 K=4``; None where no router is at work."""
        routing = self.backbone.active_routing
        return None if routing is None else f"{routing.selector} S={routing.num_groups} K={routing.kept_groups}"

    def warning(self) -> str | None:
        """Where the settings cannot change what a harness scores."""
        if self.compression.eviction is None or self.protocol == "context_first":
            return None
        return (
            f"{self.compression.label} acts after the whole prompt was read: under protocol=query_aware it cannot "
            "change the first token after the prompt, and so no log-likelihood of one-token answers; "
            "protocol=context_first evicts before the question is read"
        )

    def __str__(self) -> str:
        """The report, in lines."""
        sums = self.sums
        acting = [self.backbone.reducer.name, self.routing, self.compression.label]
        lines = [f"subtoken: {self.prompts:,} prompts; {', '.join(filter(None, acting))}; protocol {self.protocol}"]
        if not self.prompts:
            return f"{lines[0]}\nno prompt was run (all answers came from a cache, or there were no requests)"
        lines.append(_line("KV of the prompts", sums["kv_bytes"], sums["dense_kv_bytes"], "bytes"))
        if sums["region_dense_bytes"]:
            lines.append(_line("compressed region", sums["region_bytes"], sums["region_dense_bytes"], "bytes"))
            lines.append(
                _line("its entries, in any head", sums["entries_after"], sums["entries_before"], "(token, layer) pairs")
            )
        else:
            lines.append("no prompt had anything that may be compressed (an image, or a context before its question)")
        lines += filter(None, [emptied_words(self.emptied, self.compression.label)])
        return "\n".join(lines)


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _line(what: str, kept: int, dense: int, unit: str) -> str:
    return f"{what}: {kept:,} of {dense:,} {unit} kept ({share_words(kept / dense, 2)})"


class Runner(Generic[PromptT]):
    """A loaded model, and what compression did to the prompts that it was asked so far.

    Args:
        model: the model.
        arguments: its batch size and protocol.
        collate: makes a batch of prompts.
        length: by which prompts are ordered, so that a batch holds like ones.

    Raises:
        ValueError: a method that the protocol leaves nothing to read.
    """

    def __init__(
        self,
        model: SubTokenModel,
        arguments: ModelArguments,
        collate: Callable[[Sequence[PromptT]], Batch],
        length: Callable[[PromptT], int],
    ) -> None:
        if arguments.protocol == "context_first":
            check_context_first(model.backbone, model.compression)
        self.model, self.arguments = model, arguments
        self.collate, self.length = collate, length
        self.counted = Counted(model.backbone, model.compression, arguments.protocol)

    def score(
        self, requests: Sequence[tuple[PromptT, Sequence[int]]], done: Callable[[int, Scored], None]
    ) -> list[Scored]:
        """Log-likelihoods of continuations; those of equal prompts share one pass over it.

        Args:
            requests: prompt, and token ids of its continuation.
            done: called with a request's index and outcome, as soon as it is known.

        Raises:
            ValueError: as ``score_batch``.
        """
        outcomes: list[Scored] = [(0.0, False)] * len(requests)
        by_prompt: dict[PromptT, list[int]] = defaultdict(list)
        for i, (prompt, _) in enumerate(requests):
            by_prompt[prompt].append(i)
        groups = [
            (prompt, members[start : start + SHARED])
            for prompt, members in by_prompt.items()
            for start in range(0, len(members), SHARED)
        ]
        groups.sort(key=lambda group: -self.length(group[0]))
        for start in range(0, len(groups), self.arguments.prompts_together):
            chunk = groups[start : start + self.arguments.prompts_together]
            results = score_batch(
                self.model.backbone,
                self._batch([prompt for prompt, _ in chunk]),
                [[requests[i][1] for i in members] for _, members in chunk],
                compression=self.model.compression,
                protocol=self.arguments.protocol,
            )
            self.counted.add(results)
            for (_, members), result in zip(chunk, results, strict=True):
                for i, logprob, greedy in zip(members, result.logprobs, result.greedy, strict=True):
                    outcomes[i] = (logprob, greedy)
                    done(i, outcomes[i])
        return outcomes

    def generate(
        self, requests: Sequence[tuple[PromptT, GreedySettings]], done: Callable[[int, str], None]
    ) -> list[str]:
        """Greedy answers, without the texts that end them.

        Args:
            requests: prompt and settings.
            done: called with a request's index and answer, as soon as it is known.

        Raises:
            ValueError: as ``generate_batch``.
        """
        texts = [""] * len(requests)
        by_settings: dict[GreedySettings, list[int]] = defaultdict(list)
        for i, (_, settings) in enumerate(requests):
            by_settings[settings].append(i)
        for settings, members in by_settings.items():
            members.sort(key=lambda i: -self.length(requests[i][0]))
            for start in range(0, len(members), self.arguments.prompts_together):
                chunk = members[start : start + self.arguments.prompts_together]
                results = generate_batch(
                    self.model.backbone,
                    self._batch([requests[i][0] for i in chunk]),
                    max_new_tokens=settings.max_new_tokens,
                    stop=settings.stop,
                    compression=self.model.compression,
                    protocol=self.arguments.protocol,
                )
                self.counted.add(results)
                for i, result in zip(chunk, results, strict=True):
                    texts[i] = result.text
                    done(i, result.text)
        return texts

    def _batch(self, prompts: Sequence[PromptT]) -> Batch:
        batch: Batch = move_data_to_device(self.collate(prompts), self.model.backbone.family.model.device)
        return batch
