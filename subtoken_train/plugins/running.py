"""A harness's requests in batches on compressed caches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict
from typing import Any, Generic, TypeVar

from lightning.fabric.utilities import move_data_to_device

from subtoken_train.inference.batched import generate_batch, in_batches, score_batch
from subtoken_train.inference.model import SubTokenModel
from subtoken_train.inference.prefill import check_context_first
from subtoken_train.plugins.arguments import GreedySettings, ModelArguments
from subtoken_train.plugins.counting import Counted
from subtoken_train.types import Batch

SHARED = 16
"""Continuations after one pass over their prompt, at most; they run one after another, and its batch waits for them."""
PromptT = TypeVar("PromptT", bound=Hashable)
Scored = tuple[float, bool]
"""Log-likelihood in nats, and whether greedy decoding gives the continuation."""


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
        self._how: dict[str, Any] = {"compression": model.compression, "protocol": arguments.protocol}
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
        groups = [(prompt, part) for prompt, members in by_prompt.items() for part in in_batches(members, SHARED)]
        groups.sort(key=lambda group: -self.length(group[0]))
        for chunk in in_batches(groups, self.arguments.prompts_together):
            after = [[requests[i][1] for i in members] for _, members in chunk]
            results = score_batch(self.model.backbone, self._batch([prompt for prompt, _ in chunk]), after, **self._how)
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
            for chunk in in_batches(members, self.arguments.prompts_together):
                prompts = self._batch([requests[i][0] for i in chunk])
                results = generate_batch(self.model.backbone, prompts, **asdict(settings), **self._how)
                self.counted.add(results)
                for i, result in zip(chunk, results, strict=True):
                    texts[i] = result.text
                    done(i, result.text)
        return texts

    def _batch(self, prompts: Sequence[PromptT]) -> Batch:
        batch: Batch = move_data_to_device(self.collate(prompts), self.model.backbone.family.device)
        return batch
