"""Whole batches of prompts: generate answers, or score continuations, with what every sample's cache took.

Legend: B batch, q appended tokens, D model width, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from subtoken_train.cache.cache import PackedCache
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.inference.accounting import KeptPrompt, Measured, account
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.decoding import TokenScore, check_continuations, given_tokens, greedy_tokens
from subtoken_train.inference.opening import open_prompts
from subtoken_train.types import Batch, Protocol

T = TypeVar("T")


def in_batches(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """The items in order, ``size`` at a time; the last may be fewer."""
    return (items[start : start + size] for start in range(0, len(items), size))


@dataclass(frozen=True, kw_only=True)
class Outcome(Measured):
    """One prompt of a batch.

    Attributes:
        text: generated text, special tokens and everything from the first stop text on cut, not stripped; "" when
            scored.
        token_ids: generated ids, end-of-text and what follows cut; [] when scored.
        logprobs: sum of the log-probabilities of each continuation; [] when generated.
        greedy: whether each continuation is what greedy decoding would say; [] when generated.
        keys_after: see ``KeptPrompt``.
        reference: score of the given reference's tokens; None where none was given, and when scored.
    """

    text: str
    token_ids: list[int]
    logprobs: list[float]
    greedy: list[bool]
    keys_after: float
    reference: TokenScore | None = None


@torch.no_grad()
def generate_batch(
    backbone: CompressedBackbone,
    prompts: Batch,
    *,
    max_new_tokens: int,
    stop: Sequence[str] = (),
    compression: Compression | None = None,
    protocol: Protocol = "query_aware",
    references: Sequence[Sequence[int]] | None = None,
) -> list[Outcome]:
    """Greedy answers to a batch of prompts.

    References are scored from the very cache that the answers are then decoded from (``given_tokens``), before them and
    outside of the seconds.

    Args:
        backbone: in evaluation mode.
        prompts: a batch without answers, on the model's device, padded on either side.
        max_new_tokens: at most this many tokens per sample.
        stop: texts that end an answer; an empty one ends none.
        compression: eviction and precision; None: none, the model's dtype.
        protocol: what is seen when the cache is compressed, see ``open_prompts``.
        references: token ids of each prompt's reference answer, to be scored too; an empty one is not. Not with
            ``eviction_every``, under which tokens leave the cache for good.

    Raises:
        ValueError: as ``open_prompts``; ``max_new_tokens`` below 1; or references that cannot be scored.
    """
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens} must be at least 1")
    compression = compression or Compression()
    if references is not None:
        if compression.every is not None:
            raise ValueError(f"references cannot be scored with eviction_every={compression.every}; leave one out")
        check_continuations(prompts, [[ids] if len(ids) else [] for ids in references])
    tokenizer, start = backbone.family.tokenizer, _now(prompts)
    stops = [text for text in stop if text]
    # a special token is no part of the decoded text
    end_ids = {tokenizer.eos_token_id, *(i for text, i in _special_ids(tokenizer).items() if text in stops)}

    # a token that is text has a byte at least: no stop begins before these
    window = max((len(text.encode()) for text in stops), default=0) + 1

    def ended(generated: list[Tensor]) -> Tensor:
        rows = torch.stack(generated[-window:], dim=1).tolist()
        texts = tokenizer.batch_decode(rows, skip_special_tokens=True)
        said = [
            row[-1] in end_ids or any(each in text for each in stops) for row, text in zip(rows, texts, strict=True)
        ]
        return torch.tensor(said, device=generated[-1].device)

    cache = PackedCache(backbone.family.shape.num_layers)
    opened = open_prompts(backbone, prompts, cache, compression, protocol)
    parts = account(backbone, prompts, opened, cache)  # before eviction_every changes it
    filled = begun = _now(prompts)
    scores: list[TokenScore | None] = [None] * len(parts)
    if references is not None:
        reads = compression.eviction is not None and compression.eviction.reads
        scores = given_tokens(backbone, cache, opened.logits_BV, references, chooses_pages=reads)
        begun = _now(prompts)
    tokens_BT, count_B = greedy_tokens(backbone, cache, opened.logits_BV, max_new_tokens, ended if stops else None)
    outcomes = _outcomes(parts, filled - start, _now(prompts) - begun)
    for i, (row, count) in enumerate(zip(tokens_BT.tolist(), count_B.tolist(), strict=True)):
        ids = row[: count - 1] if row[count - 1] in end_ids else row[:count]
        text: str = tokenizer.decode(ids, skip_special_tokens=True)
        cut = min((text.find(each) for each in stops if each in text), default=len(text))
        outcomes[i] = replace(outcomes[i], text=text[:cut], token_ids=ids, new_tokens=count, reference=scores[i])
    return outcomes


@torch.no_grad()
def score_batch(
    backbone: CompressedBackbone,
    prompts: Batch,
    continuations: Sequence[Sequence[Sequence[int]]],
    *,
    compression: Compression | None = None,
    protocol: Protocol = "query_aware",
) -> list[Outcome]:
    """Log-probabilities of each prompt's continuations, log-softmax in fp32.

    A prompt runs once for all of its continuations, and its next-token logits score their first tokens; single tokens
    need nothing else. The others are appended to the cache one after another (those of a batch together, long ones with
    long ones), and cropped off again. Nothing is generated, and ``eviction_every`` has nothing to do; what is so long
    that it would act is refused.

    Args:
        backbone: in evaluation mode.
        prompts: a batch without answers, on the model's device, padded on either side.
        continuations: token ids of each prompt's continuations; prompts may have different numbers of them.
        compression: eviction and precision; None: none, the model's dtype.
        protocol: what is seen when the cache is compressed, see ``open_prompts``.

    Raises:
        ValueError: as ``open_prompts``; an empty continuation, or one that is longer than ``eviction_every``.
    """
    check_continuations(prompts, continuations)
    compression = compression or Compression()
    longest = max((len(ids) for of_prompt in continuations for ids in of_prompt), default=0)
    if compression.every is not None and longest > compression.every:
        raise ValueError(
            f"a continuation of {longest} tokens is scored, and eviction_every={compression.every} evicts while tokens "
            "are generated; leave it out to score texts"
        )
    start, cache = _now(prompts), PackedCache(backbone.family.shape.num_layers)
    opened = open_prompts(backbone, prompts, cache, replace(compression, every=None), protocol)
    filled = _now(prompts)
    table: dict[tuple[int, int], TokenScore] = {}
    by_length = [sorted(range(len(c)), key=lambda k, c=c: -len(c[k])) for c in continuations]  # type: ignore[misc]
    for turn in range(max(map(len, by_length))):
        chosen = {b: order[turn] for b, order in enumerate(by_length) if turn < len(order)}
        ids = [continuations[b][chosen[b]] if b in chosen else [] for b in range(len(by_length))]
        found = given_tokens(backbone, cache, opened.logits_BV, ids)
        table |= {(b, k): score for (b, k), score in zip(chosen.items(), filter(None, found), strict=True)}
    done = _now(prompts)
    outcomes = _outcomes(account(backbone, prompts, opened, cache), filled - start, done - filled)
    for b, of_prompt in enumerate(continuations):
        of_texts = [table[b, k] for k in range(len(of_prompt))]
        outcomes[b] = replace(
            outcomes[b],
            logprobs=[score.logprob for score in of_texts],
            greedy=[score.right == score.count for score in of_texts],
            new_tokens=sum(map(len, of_prompt)),
        )
    return outcomes


def _now(prompts: Batch) -> float:
    """Seconds of a clock, read once the prompts' device has done what it was given."""
    device = prompts.input_ids_BN.device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _outcomes(parts: list[KeptPrompt], prefill_seconds: float, decode_seconds: float) -> list[Outcome]:
    """Outcomes without answers; the seconds are the batch's."""
    batch = len(parts)
    return [
        Outcome(
            text="",
            token_ids=[],
            logprobs=[],
            greedy=[],
            new_tokens=0,
            batch_size=batch,
            prefill_seconds=round(prefill_seconds / batch, 5),
            decode_seconds=round(decode_seconds / batch, 5),
            **asdict(part),
        )
        for part in parts
    ]


def _special_ids(tokenizer: object) -> dict[str, int]:
    tokens, ids = tokenizer.all_special_tokens, tokenizer.all_special_ids  # type: ignore[attr-defined]
    return dict(zip(tokens, ids, strict=True))
