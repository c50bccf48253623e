"""Decode steps of one shape, whatever the number of tokens: they can be compiled, and captured in a CUDA graph.

The tail's room is made first and read whole, its unwritten places hidden; how many tokens are written is a number on
the device. A compiled or captured step serves one cache: worth its making for long answers. Legend: B batch, V
vocabulary.
"""

from collections.abc import Callable
from types import FunctionType, MethodType, TracebackType
from typing import Self

import torch
from torch import Tensor
from torch._dynamo import mark_static_address
from transformers import CompileConfig

from subtoken_train.cache.cache import PackedCache
from subtoken_train.engine.attention import use_packed_attention
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.errors import refuse
from subtoken_train.families.positions import rotary_kind
from subtoken_train.inference.prefill import next_logits

WARM_UP = 3
"""Steps that run before one is captured, as torch asks for; what they wrote is written again."""


class FixedStep:
    """Steps on a filled cache, one token of every sample each; a context manager, inside which nothing else uses it.

    It is an ordinary cache when the block ends.

    Args:
        compile_config: of ``torch.compile``, as transformers' ``generate`` takes it; None: the step runs as it is.
        cuda_graph: capture the step and replay it; without ``compile_config``, whose mode ``reduce-overhead`` does so.
    """

    def __init__(
        self,
        backbone: CompressedBackbone,
        cache: PackedCache,
        tokens: int,
        *,
        compile_config: CompileConfig | None = None,
        cuda_graph: bool = False,
    ) -> None:
        self.backbone, self.cache, self.tokens = backbone, cache, tokens
        self.device = backbone.family.device
        self._check(compile_config, cuda_graph)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._captures = cuda_graph
        self._run: Callable[[Tensor], Tensor] = self._step
        if compile_config is not None:
            self._run = torch.compile(self._own_step(), **compile_config.to_dict())

    def _check(self, compile_config: CompileConfig | None, cuda_graph: bool) -> None:
        cache, compiled = self.cache, compile_config is not None
        dynamic = (cuda_graph or compiled) and rotary_kind(self.backbone.family.decoder.rotary_emb) == "dynamic"
        devices = {layer.device for layer in cache.layers if cache.holds_prompt} | {self.device}
        elsewhere = cuda_graph and self.device.type != "cuda"
        online = "eviction_every packs decoded tokens, so its storage changes shape, and a fixed step has one"
        turned = "the rotary embedding is 'dynamic', whose frequencies the host recomputes for every token"
        refuse(
            (self.tokens < 1, f"tokens={self.tokens}: a fixed step needs at least one token"),
            (not cache.holds_prompt, "a fixed step needs a cache with a prompt; run the prompt first"),
            (cache.evictor is not None, f"{online}; leave eviction_every out, or decode without a fixed step"),
            (len(devices) > 1, "the model's layers are on several devices, and a fixed step runs on one"),
            (dynamic, f"{turned}; run the step without cuda_graph and compile_config"),
            (elsewhere, f"cuda_graph=True: the model is on {str(self.device)!r}; leave it out, or move it to CUDA"),
            (cuda_graph and compiled, "cuda_graph=True captures a step as it is; mode='reduce-overhead' does both"),
        )

    def __enter__(self) -> Self:
        assert self.cache.next_position is not None
        use_packed_attention(self.backbone.family.decoder.config)
        self.left = self.tokens
        self.cache.choose_pages(True)
        self.cache.prepare()  # no graph can
        self.cache.fix_shape(self.tokens)
        self.cache.let_append(True)
        assert self.cache.written is not None
        # of its own and at one address, because steps count it up in place
        self._position = self.cache.next_position = self.cache.next_position.clone()
        for layer in self.cache.layers:
            for states in (layer.keys, layer.values, self._position, self.cache.written):
                mark_static_address(states)
        if self._captures:
            self._capture()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.cache.free_shape()
        self.cache.let_append(False)
        self._graph = None

    @torch.no_grad()
    def __call__(self, ids_B1: Tensor) -> Tensor:
        """Append a token of every sample, [B, 1]; logits of the next one, [B, V]."""
        if not self.left:
            raise ValueError(f"this fixed step was made for {self.tokens} tokens, and has used them; make it for more")
        self.left -= 1
        if self._graph is None:
            logits = self._run(ids_B1)
        else:
            self._ids_B1.copy_(ids_B1)
            self._graph.replay()
            logits = self._logits_BV
        self.cache.count(1)
        return logits

    def _own_step(self) -> Callable[[Tensor], Tensor]:
        """The step as a function with code of its own, by which torch counts compilations and gives up after a few."""
        shared = type(self)._step
        return MethodType(FunctionType(shared.__code__.replace(), shared.__globals__), self)

    def _step(self, ids_B1: Tensor) -> Tensor:
        family, written = self.backbone.family, self.cache.written
        assert written is not None
        written.add_(1)
        hidden = family.decode(family.token_states(ids_B1), self._position, self.cache)
        self._position.add_(1)
        return next_logits(self.backbone, hidden)

    @torch.no_grad()
    def _capture(self) -> None:
        assert self.cache.written is not None
        counters = self._position, self.cache.written
        before = [counter.clone() for counter in counters]
        self._ids_B1 = torch.zeros(self._position.shape[-2], 1, dtype=torch.long, device=self.device)
        stream: torch.cuda.Stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        graph = torch.cuda.CUDAGraph()
        try:
            stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(stream):
                for _ in range(WARM_UP):
                    self._step(self._ids_B1)
                    for counter, value in zip(counters, before, strict=True):
                        counter.copy_(value)
            torch.cuda.current_stream(self.device).wait_stream(stream)
            with torch.cuda.graph(graph):
                self._logits_BV = self._step(self._ids_B1)
        except BaseException:
            self.cache.free_shape()
            self.cache.let_append(False)
            raise
        self._graph = graph
