"""The step that decodes: the layers on tokens that are appended. On CUDA it is captured in a graph and replayed.

A step's calls take the host several times as long as their work takes the device; a replayed graph is one call. What is
captured is the step itself, on a cache of one shape (``cache/one_shape.py``). A model's last graphs are kept: another
prompt of the same shape takes one over, under the same weights alone.

Legend: B batch, q appended tokens, D model width, V vocabulary.
"""

import warnings
from collections.abc import Callable, Hashable
from functools import partial
from itertools import chain
from weakref import WeakKeyDictionary

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from subtoken_train.cache.cache import RESERVED, PackedCache
from subtoken_train.cache.one_shape import OneShape, room_for, shape_of
from subtoken_train.cache.packed_layer import PackedLayer
from subtoken_train.engine.attention import use_packed_attention
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.errors import SubTokenWarning
from subtoken_train.families.family import Family
from subtoken_train.families.positions import position_bound, rotary_kind, warn_beyond
from subtoken_train.forks import undoing

FEW = 8
"""Fewer tokens of an answer are not worth a graph, whose making costs three steps."""
KEPT = 4
"""Graphs of a model that are kept, each with the room of its tails."""
DEVICES = ("cuda",)
SLOWLY = "step by step, because "
_graphs: WeakKeyDictionary[nn.Module, list["CapturedStep"]] = WeakKeyDictionary()


def run_step(backbone: CompressedBackbone, token_ids_Bq: Tensor, cache: PackedCache) -> Tensor:
    """Run the layers on tokens that are appended, [B, q, D]; of a cache of one shape the host reads nothing."""
    assert cache.next_position is not None
    # padding stands at 0, as in a prompt: models may divide or take logarithms of positions
    positions = (cache.next_position + torch.arange(token_ids_Bq.shape[1], device=token_ids_Bq.device)).clamp(min=0)
    cache.advance(token_ids_Bq.shape[1])
    return backbone.family.decode(backbone.family.token_states(token_ids_Bq), positions, cache)


@torch.no_grad()
def next_logits(backbone: CompressedBackbone, hidden_BqD: Tensor) -> Tensor:
    """Logits after the last of appended tokens, [B, V]."""
    return backbone.family.logits(hidden_BqD[:, -1:])[:, -1]


def warn_of_positions(
    backbone: CompressedBackbone, cache: PackedCache, new: int, padding_B: Tensor | None = None
) -> None:
    """Warn, once a sequence, where the next tokens pass the positions that the model was made for."""
    config, held = backbone.family.decoder.config, cache.next_position
    assert held is not None
    bound = position_bound(config)
    if bound is not None and cache.get_seq_length() + new > bound:  # positions may be fewer than tokens
        start = held if padding_B is None else held - padding_B[:, None]
        warn_beyond(config, int(start.max()) + new, int(held.max()))


class CapturedStep:
    """A step of one token of every sample, captured for all caches of a shape; ``shape`` holds what it reads."""

    def __init__(self, backbone: CompressedBackbone, cache: PackedCache, key: Hashable, room: int) -> None:
        self.key, self.shape = key, OneShape(cache, room)
        self.ids_B1 = torch.zeros(self.shape.position.shape[-2], 1, dtype=torch.long, device=self.shape.written.device)
        self.shape.take(cache)
        counters = self.shape.position, self.shape.written
        before = [counter.clone() for counter in counters]

        def step() -> Tensor:
            return next_logits(backbone, run_step(backbone, self.ids_B1, cache))

        def again() -> None:
            for counter, value in zip(counters, before, strict=True):
                counter.copy_(value)

        use_packed_attention(backbone.family.decoder.config)
        cache.choose_pages(True)
        try:
            with cache.appending():
                self.replay = capture(step, again, self.ids_B1.device)
        except BaseException:
            again()
            raise

    @torch.no_grad()
    def __call__(self, ids_B1: Tensor, cache: PackedCache) -> Tensor:
        """Append a token of every sample, [B, 1]; logits of the next one, [B, V], until the next call."""
        self.ids_B1.copy_(ids_B1)
        logits_BV = self.replay()
        cache.count(1)
        return logits_BV


@torch.no_grad()
def capture(step: Callable[[], Tensor], again: Callable[[], None], device: torch.device) -> Callable[[], Tensor]:
    """Capture a step in a CUDA graph, whose replay returns what it returned; ``again`` sets back what steps count.

    Two steps run before, so that all that is made once is there; what they wrote is written again.
    """
    with torch.cuda.device(device):
        stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        graph = torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
            again()
            with undoing(partial(torch.cuda.set_sync_debug_mode, torch.cuda.get_sync_debug_mode())):
                torch.cuda.set_sync_debug_mode("error")  # what waits for the device would break the capture
                step()
            again()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads may go on
            logits_BV = step()

    def replay() -> Tensor:
        graph.replay()
        return logits_BV

    return replay


def captured_step(backbone: CompressedBackbone, cache: PackedCache) -> CapturedStep | None:
    """Return the step of a cache of which tokens are ``expected``, ready to run; None: it runs as it is called."""
    family = backbone.family
    if cache.expected < FEW or family.device.type not in DEVICES or cache.way.startswith(SLOWLY):
        return None
    kept, length = _graphs.setdefault(family.model, []), cache.layers[0].tail_length
    warn_of_positions(backbone, cache, 1)
    for step in kept:
        if cache.shape is step.shape and length < step.shape.room:
            return step
    cache.free_shape()
    if (reason := uncaptured(backbone, cache)) is not None:
        cache.way = f"{SLOWLY}{reason}"
        return None
    room = room_for(max(length + 1, min(length + cache.expected, RESERVED)))
    key = shape_of(cache, room), _weights(family)
    found = next((step for step in kept if step.key == key), None)
    if found is None:
        del kept[KEPT - 1 :]
        try:
            found = CapturedStep(backbone, cache, key, room)
        except RuntimeError as error:
            cache.free_shape()
            short = isinstance(error, torch.OutOfMemoryError)
            why = "memory does not suffice for a graph" if short else f"a step cannot be captured: {error}"
            cache.way = f"{SLOWLY}{why.splitlines()[0]}"
            warnings.warn(f"the answer is decoded {cache.way}", SubTokenWarning, stacklevel=1)
            return None
    else:
        found.shape.take(cache)
        kept.remove(found)
    kept.insert(0, found)
    cache.way = "captured in a graph"
    return found


def uncaptured(backbone: CompressedBackbone, cache: PackedCache) -> str | None:
    """Say in words why a step is not captured; None: it can be."""
    family = backbone.family
    decoder = family.decoder
    devices = {family.device, *(each.device for each in chain(cache.layers, decoder.parameters()))}
    hooked = any(each._forward_hooks or each._forward_pre_hooks for each in decoder.modules())
    reasons = (
        (cache.evictor is not None, "eviction_every changes what is stored"),
        (family.length_dependent, f"{rotary_kind(decoder.rotary_emb)!r} positions are turned by what the host reads"),
        (len(devices) > 1, "the model lies on several devices"),
        (torch.is_autocast_enabled(family.device.type), "autocast holds its copies of weights for one block alone"),
        (any(type(each) is not PackedLayer for each in cache.layers), "every step is watched"),
        (hooked, "hooks of the model's modules run on the host"),
    )
    return next((words for there, words in reasons if there), None)


def _weights(family: Family) -> Hashable:
    """Return where the weights of a step lie, and which LoRA acts: a graph of others is never replayed."""
    read = family.decoder, family.model.get_input_embeddings(), family.model.get_output_embeddings()
    states = {each.data_ptr(): each.dtype for part in read for each in chain(part.parameters(), part.buffers())}
    layers = [each for each in family.decoder.modules() if isinstance(each, BaseTunerLayer)]
    lora = (
        (*each.active_adapters, each.disable_adapters, each.merged, str(vars(each).get("scaling"))) for each in layers
    )
    return tuple(states.items()), tuple(lora), family.decoder.config._attn_implementation
