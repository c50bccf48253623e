"""Answers that are made together: a token of each in one pass, whatever their prompts, lengths and settings.

Legend: B rows, N positions, V vocabulary.
"""

from collections.abc import Callable, Container, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from subtoken_train.cache.cache import PackedCache
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.engine.prompt_pass import broken_rows
from subtoken_train.errors import no_numbers
from subtoken_train.inference.answer_stream import AnswerStream
from subtoken_train.inference.batched import end_ids
from subtoken_train.inference.cache_report import held_bytes
from subtoken_train.inference.decode_step import FEW
from subtoken_train.inference.prefill import decode, decode_joined
from subtoken_train.serving.line import Answer, Job


def use_onednn(model: nn.Module) -> None:
    """Let oneDNN make a model's linear maps in fp32 on a CPU, from its weights as they are; sums' last bits differ.

    It may use wider vector units than MKL does on a processor that is not Intel's.
    """
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.device.type == "cpu" and module.weight.dtype == torch.float32:
            own: Any = module.weight, module.bias, "none", [], ""
            made = partial(lambda own, rows: torch.ops.mkldnn._linear_pointwise(rows, *own), own)
            module.forward = made  # type: ignore[method-assign]


class TokenChoice:
    """Chooses an answer's tokens as transformers' ``generate``; with a ``seed`` from numbers of its own."""

    def __init__(self, model: Any, settings: dict[str, Any], ids_1N: Tensor, most: int, seed: int | None) -> None:
        config, _ = model._prepare_generation_config(None, **settings)
        model._prepare_special_tokens(config, True, device=ids_1N.device)
        config.max_length, device = ids_1N.shape[1] + most, str(ids_1N.device)
        self._processors = model._get_logits_processor(config, ids_1N.shape[1], ids_1N, device=device, model_kwargs={})
        self._ids_1N, self._draws = ids_1N, bool(config.do_sample)
        self._numbers = None if seed is None else torch.Generator(ids_1N.device).manual_seed(seed)

    @property
    def likeliest(self) -> bool:
        """Return whether the likeliest token is always chosen."""
        return not self._draws and not self._processors

    def __call__(self, logits_1V: Tensor) -> int:
        """Return the next token."""
        scores_1V = self._processors(self._ids_1N, logits_1V.float())
        if self._draws:
            token_11 = torch.multinomial(scores_1V.softmax(-1), 1, generator=self._numbers)
        else:
            token_11 = scores_1V.argmax(-1, keepdim=True)
        self._ids_1N = torch.cat([self._ids_1N, token_11], 1)
        return int(token_11)


@dataclass(eq=False)
class Row:
    """One answer of ``most`` tokens at most, and the cache that it grows; ``dense_bytes``: of an uncompressed prompt.

    ``finish``: ``stop``, ``length``, or "" where it was ended from outside; None: it goes on. ``own_bytes``: its own.
    """

    job: Job
    prompt_tokens: int
    cached_tokens: int
    most: int
    stream: AnswerStream
    cache: PackedCache
    choice: TokenChoice
    dense_bytes: int
    own_bytes: int = 0
    notes: list[str] = field(default_factory=list)
    finish: str | None = None

    @property
    def new_tokens(self) -> int:
        """Tokens of the answer so far."""
        return len(self.stream.token_ids)

    def put(self, token: int, ends: Container[int]) -> None:
        """Take the next token."""
        self.stream.put(torch.tensor([token]))
        if self.stream.ended or token in ends:
            self.finish = "stop"
        elif self.new_tokens >= self.most:
            self.finish = "length"
        elif self.job.is_over():
            self.finish = ""
        else:
            return
        self.stream.end()

    def answer(self, token_bytes: int) -> Answer:
        """Return what is told at the end; the last token is in no cache."""
        held = held_bytes(self.cache)
        parts = ("payload_bytes", "index_bytes", "tail_bytes", "statistics_bytes", "kernel_bytes")
        dense = self.dense_bytes + (self.new_tokens - 1) * token_bytes
        counts = self.prompt_tokens, self.cached_tokens, self.new_tokens, sum(held[part] for part in parts), dense
        return Answer(self.finish or "", *counts, self.notes)


class RunningRows:
    """Rows that take a step at a time; ``ended`` is called once with each that leaves, and what it failed with."""

    def __init__(self, backbone: CompressedBackbone, ended: Callable[[Row, BaseException | None], None]) -> None:
        self._backbone, self._ended, self._ends = backbone, ended, end_ids(backbone.family)
        self.rows: list[Row] = []
        self._steps = 0  # since a row came or left

    def join(self, row: Row, logits_1V: Tensor) -> None:
        """Let a row in whose prompt is in its cache, and say its first token."""
        self.rows.append(row)
        self._steps = 0
        self._say([row], logits_1V)

    def step(self) -> None:
        """Say a token of every row; those that must not share a pass (they evict, or angles differ) take one each."""
        family, bank = self._backbone.family, self._backbone.bank
        alone = [row for row in self.rows if row.cache.evictor is not None or family.length_dependent]
        together = [row for row in self.rows if row not in alone]
        with family.as_long_as(None), nullcontext() if bank is None else bank.paused():
            if len(together) < 2 or not self._advance(together, shared=True):
                alone = [*together, *alone]
            for row in alone:
                self._advance([row], shared=False)

    def _advance(self, rows: Sequence[Row], shared: bool) -> bool:
        """Take a step; False where the rows share it and it fails: which one it was for, each says by itself."""
        bone = self._backbone
        ids_B1 = torch.tensor([row.stream.token_ids[-1:] for row in rows], device=bone.family.device)
        try:
            caches = [row.cache for row in rows]
            if shared:
                self._steps += 1
                logits_BV = decode_joined(bone, ids_B1, caches, captures=self._steps > FEW)
            else:
                logits_BV = decode(bone, ids_B1, caches[0])
        except BaseException as error:
            if not shared:
                self._leave(rows[0], error)
            return False
        self._say(rows, logits_BV)
        return True

    def _say(self, rows: Sequence[Row], logits_BV: Tensor) -> None:
        broken, likeliest = broken_rows(logits_BV).tolist(), logits_BV.argmax(-1).tolist()
        for place, row in enumerate(rows):
            try:
                if broken[place]:
                    raise no_numbers(f"at token {row.new_tokens + 1} of an answer", logits_BV.dtype)
                token = likeliest[place] if row.choice.likeliest else row.choice(logits_BV[place : place + 1])
                row.put(token, self._ends)
            except BaseException as error:
                self._leave(row, error)
            else:
                if row.finish is not None:
                    self._leave(row, None)

    def _leave(self, row: Row, error: BaseException | None) -> None:
        self.rows.remove(row)
        self._steps = 0
        self._ended(row, error)
