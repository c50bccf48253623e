"""Contexts that were compressed before any question, and answers from them.

Legend: B contexts, N positions, q tokens of a question.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from subtoken_train.cache.cache import PackedCache
from subtoken_train.datasets.text_batches import padding_id
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.errors import SubTokenWarning
from subtoken_train.families.family import Family
from subtoken_train.inference.accounting import held_rows
from subtoken_train.inference.cache_file import CacheHeader, read_cache, shape_of, write_cache
from subtoken_train.inference.cache_report import CacheReport, report
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.decoding import greedy_tokens
from subtoken_train.inference.opening import append_rest
from subtoken_train.inference.prefill import prefill
from subtoken_train.inference.question_frames import QuestionFrame
from subtoken_train.inference.tokens_given import check_ids
from subtoken_train.ledger.measure import emptied_regions, emptied_words
from subtoken_train.types import Batch


@dataclass(frozen=True, eq=False)
class CompressedContext:
    """One or more contexts in one cache, which never changes: every question is answered on a branch of it.

    Attributes:
        backbone: what compressed them.
        compression: how.
        packed: the cache; nothing follows the contexts in it.
        frames: of the questions of each context.
        digests: SHA-256 of each context's token ids and pixels, in hexadecimal.
        report: what the cache takes.
    """

    backbone: CompressedBackbone
    compression: Compression
    packed: PackedCache
    frames: list[QuestionFrame]
    digests: list[str]
    report: CacheReport

    @classmethod
    def of(
        cls, backbone: CompressedBackbone, compression: Compression, batch: Batch, frames: list[QuestionFrame]
    ) -> CompressedContext:
        """Compress contexts in one pass, which all of them share.

        Args:
            backbone: in evaluation mode.
            compression: eviction and precision.
            batch: contexts that were checked, see ``context_batches``.
            frames: of their questions.
        """
        cache = PackedCache(backbone.family.shape.num_layers)
        plan = prefill(backbone, batch, cache, compression).plan
        held_LBN = held_rows(backbone.family.windows, batch.regions_BN)
        if words := emptied_words(emptied_regions(plan, batch.regions_BN, held_LBN), compression.label):
            warnings.warn(words, SubTokenWarning, stacklevel=3)
        took = report(backbone, replace(batch, pixel_values=None), plan, cache, compression.key_channels)
        return cls(backbone, compression, cache, frames, batch.record_ids, took)

    def answers(self, questions: Sequence[Sequence[str]], max_new_tokens: int) -> list[list[str]]:
        """Greedy answers to the questions of every context.

        The first questions of all contexts are answered together, then the second ones; no question sees another.

        Args:
            questions: of each context; they may have different numbers of them.
            max_new_tokens: of one answer, at most.

        Raises:
            ValueError: a question that is empty, or that holds a picture.
        """
        family = self.backbone.family
        asked = [[frame.ids(family, each) for each in own] for frame, own in zip(self.frames, questions, strict=True)]
        self._check(asked)
        found: list[list[str]] = [[] for _ in asked]
        for turn in range(max(map(len, asked), default=0)):
            rows = [row for row, own in enumerate(asked) if turn < len(own)]
            texts = self._round(rows, [asked[row][turn] for row in rows], max_new_tokens)
            for row, text in zip(rows, texts, strict=True):
                found[row].append(text)
        return found

    def _round(self, rows: list[int], asked: list[list[int]], max_new_tokens: int) -> list[str]:
        """An answer for each of some contexts."""
        family, cache = self.backbone.family, self.packed.branch()
        if len(rows) < len(self.frames):
            cache.batch_select_indices(torch.tensor(rows))
        tokenizer, width = family.tokenizer, max(map(len, asked))
        pad = padding_id(tokenizer)
        ids_Bq = torch.tensor([[pad] * (width - len(ids)) + ids for ids in asked], device=family.device)
        missing_B1 = torch.tensor([[width - len(ids)] for ids in asked], device=family.device)
        padding_Bq = torch.arange(width, device=family.device) < missing_B1
        logits_BV = append_rest(self.backbone, ids_Bq, padding_Bq, cache, self.compression.prefill_chunk)
        ends = torch.tensor(_end_ids(family), dtype=torch.long, device=family.device)
        tokens_BT, count_B = greedy_tokens(
            self.backbone, cache, logits_BV, max_new_tokens, lambda generated: torch.isin(generated[-1], ends)
        )
        rows_of_ids = [row[:count] for row, count in zip(tokens_BT.tolist(), count_B.tolist(), strict=True)]
        texts: list[str] = tokenizer.batch_decode(rows_of_ids, skip_special_tokens=True)
        return [text.strip() for text in texts]

    def _check(self, asked: list[list[list[int]]]) -> None:
        """Raise a worded ``ValueError`` where questions hold ids that the model does not know."""
        for ids in (ids for own in asked for ids in own):
            check_ids(torch.tensor([ids]), self.backbone.model.get_input_embeddings().num_embeddings)

    def save(self, path: str | Path, overwrite: bool = False) -> Path:
        """Write the compressed contexts into one safetensors file, whole or not at all, see ``cache_file.py``.

        Args:
            path: of the file.
            overwrite: replace what is there.

        Raises:
            ValueError: the file is there; a cache that no model would read again (made under ``torch.autocast``, or
                with infinities in it); or ``eviction_every``, whose record of who may leave is not written.
        """
        if self.compression.every is not None:
            raise ValueError(
                f"a cache with eviction_every={self.compression.every} is not saved: what later evictions need (who "
                "competes, what was noted of them) belongs to this process; leave eviction_every out"
            )
        header = CacheHeader.of(self.backbone, self.compression, self.frames, self.digests, self.report)
        shape = shape_of(len(self.frames), self.backbone, self.compression)
        return write_cache(Path(path), header, self.packed, shape, overwrite)

    @classmethod
    def load(cls, path: str | Path, backbone: CompressedBackbone, compression: Compression) -> CompressedContext:
        """Read such a file for the model and the settings that it was written with.

        Raises:
            ValueError: see ``read_cache``.
        """
        header, packed = read_cache(Path(path), backbone, compression)
        took = replace(header.report, kernel_bytes=packed.kernel_bytes)  # of this machine's kernels
        return cls(backbone, compression, packed, header.frames, header.contexts, took)


def _end_ids(family: Family) -> list[int]:
    """Tokens that end an answer: the tokenizer's, and those of the model's generation configuration."""
    own: Any = getattr(getattr(family.model, "generation_config", None), "eos_token_id", None)
    ends = [family.tokenizer.eos_token_id, *(own if isinstance(own, list | tuple) else [own])]
    return sorted({int(end) for end in ends if end is not None})
