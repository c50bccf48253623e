"""The step that decodes: the layers on tokens that are appended. On CUDA it is captured in a graph and replayed.

A step's calls take the host several times as long as their work takes the device; a replayed graph is one call. What is
captured is the step itself, on a cache of *one shape*: it reads the whole room of the tails, with unwritten places
hidden; how many tokens are written, and where the next one stands, are numbers on the device. Its tensors stay where
they are, the fused kernels' table of addresses too, and one cache after another moves into them.

Legend: B batch, h key-value heads, T places of a tail's room, d head width, q appended tokens, D model width, V
vocabulary.
"""

import warnings
import weakref
from collections.abc import Callable, Collection, Hashable, Sequence
from contextlib import ExitStack
from itertools import chain

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from subtoken_train.cache.cache import RESERVED, JoinedCache, PackedCache
from subtoken_train.cache.key_basis import KeyBasis
from subtoken_train.cache.packed_layer import PackedLayer
from subtoken_train.engine.attention import use_packed_attention
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.errors import SubTokenWarning
from subtoken_train.families.family import Family
from subtoken_train.families.positions import position_bound, rotary_kind, warn_beyond
from subtoken_train.kernels.row_table import FusedState, RowTable, Workspace

FEW = 8  # fewer tokens of an answer are not worth a graph, whose making costs three steps
KEPT = 4  # graphs of a model that are kept, each with the room of its tails
DEVICES = ("cuda",)
SLOWLY = "step by step, because "
Key = tuple[int, Hashable]
"""Holds the room of a cache's tails, and all else that its captured steps depend on."""
_graphs: weakref.WeakKeyDictionary[nn.Module, list["CapturedStep"]] = weakref.WeakKeyDictionary()


def run_step(backbone: CompressedBackbone, token_ids_Bq: Tensor, *caches: PackedCache) -> Tensor:
    """Run the layers on tokens that are appended to a cache, or one to each of several of one row; [B, q, D].

    Of caches of one shape the host reads nothing.
    """
    family, new = backbone.family, token_ids_Bq.shape[1]
    first = torch.cat([cache.next_position for cache in caches], -2)  # type: ignore[misc]
    # padding stands at 0, as in a prompt: models may divide or take logarithms of positions
    positions = (first + torch.arange(new, device=token_ids_Bq.device)).clamp(min=0)
    for cache in caches:
        if cache.shape is not None:
            cache.shape.written.add_(new)
    read = caches[0] if len(caches) == 1 else JoinedCache(caches)
    hidden = family.decode(family.token_states(token_ids_Bq), positions, read)
    for cache in caches:
        cache.advance(new)
    return hidden


@torch.no_grad()
def next_logits(backbone: CompressedBackbone, hidden_BqD: Tensor) -> Tensor:
    """Return the logits after the last of the appended tokens, [B, V]."""
    return backbone.family.logits(hidden_BqD[:, -1:])[:, -1]


def warn_of_positions(
    backbone: CompressedBackbone, cache: PackedCache, new: int, padding_B: Tensor | None = None
) -> None:
    """Warn, once a sequence, where the next tokens pass the positions that the model was made for."""
    config, held = backbone.family.decoder.config, cache.next_position
    bound = position_bound(config)
    assert held is not None
    if bound is not None and cache.get_seq_length() + new > bound:  # positions may be fewer than tokens
        start = held if padding_B is None else held - padding_B[:, None]
        warn_beyond(config, int(start.max()) + new, int(held.max()))


def step_shape(cache: PackedCache, room: int) -> Hashable:
    """Return what a step of a cache depends on, its tensors' contents left out; equal ones share their graph."""
    cache.prepare()
    assert cache.next_position is not None
    layers = []
    for layer in cache.layers:
        basis = layer.basis and (type(layer.basis), *(tuple(each.shape) for each in layer.basis.stored.values()))
        found = layer.fused.table if all(block.pages is None for block in layer.blocks) else None
        table = weakref.ref(cache) if found is None else found.room
        states = tuple(layer.keys.shape[:2]), layer.keys.shape[3], layer.keys.dtype, layer.device
        layers.append((states, layer.tail_start_B is None, layer.reaches(room) and layer.window, basis, table))
    return room, tuple(cache.next_position.shape), tuple(layers)


class OneShape:
    """The tensors of a step of one shape, in which one cache is at a time.

    ``room``: places of every tail, T; ``written``: its tokens, int64 [1]; ``position``: the next one's; ``first_B``: of
    the tails' first places. Steps count the second and third up in place.
    """

    def __init__(self, cache: PackedCache, room: int) -> None:
        assert cache.next_position is not None
        self.room, self.position = room, cache.next_position.clone()
        self.first_B = self.position[..., 0].clone()
        self.written = torch.zeros(1, dtype=torch.long, device=cache.layers[0].device)
        workspace = Workspace()  # no other step's, which may outgrow it
        self.layers = [_LayerShape(layer, room, workspace) for layer in cache.layers]
        self.holds: weakref.ref[PackedCache] | None = None

    def take(self, cache: PackedCache) -> None:
        """Let a cache of this shape move in; one that is still here moves out."""
        if (before := self.tenant) is not None:
            before.free_shape()
        assert cache.next_position is not None
        self.written.fill_(cache.layers[0].tail_length)
        cache.next_position = self.position.copy_(cache.next_position)
        self.first_B.copy_(self.position[..., 0] - cache.layers[0].tail_length)
        cache.shape, self.holds = self, weakref.ref(cache, self._forget)
        for held, layer in zip(self.layers, cache.layers, strict=True):
            held.take(layer)
            layer.written = self.written

    @property
    def tenant(self) -> PackedCache | None:
        """Return the cache that is here."""
        cache = None if self.holds is None else self.holds()
        return cache if cache is not None and cache.shape is self else None

    @property
    def tables(self) -> list[RowTable | None]:
        """Return what says where the entries are that are read; None: steps read those of one cache where they lie."""
        return [held.fused.table for held in self.layers]

    def rest(self) -> None:
        """Let the cache move out, if one is here; a step then reads no entries."""
        if (tenant := self.tenant) is not None:
            tenant.free_shape()
        for table in self.tables:
            assert table is not None
            table.rest()

    def _forget(self, _: object) -> None:
        for held in self.layers:  # a cache that is gone keeps no entries
            held.own = None

    def release(self, cache: PackedCache) -> None:
        """Let the cache move out, with what is its own; it is an ordinary cache again, whose tails grow."""
        cache.shape, cache.next_position = None, self.position.clone()
        for held, layer in zip(self.layers, cache.layers, strict=True):
            held.release(layer)


class _LayerShape:
    def __init__(self, layer: PackedLayer, room: int, workspace: Workspace) -> None:
        batch, heads, _, width = layer.keys.shape
        self.keys, self.values = (layer.keys.new_zeros(batch, heads, room, width) for _ in range(2))
        self.start_B = None if layer.tail_start_B is None else layer.tail_start_B.clone()
        self.basis = layer.basis and layer.basis.select(torch.arange(batch))  # a copy
        table = layer.fused.table
        self.fused = FusedState(workspace, None if table is None else table.padded())
        self.own: tuple[KeyBasis | None, FusedState] | None = None

    def take(self, layer: PackedLayer) -> None:
        length, table = layer.tail_length, layer.fused.table
        self.own = layer.basis, layer.fused
        for room, states in ((self.keys, layer.keys), (self.values, layer.values)):
            room[:, :, :length] = states[:, :, :length]
            room[:, :, length:] = 0  # of a cache before it
        if self.start_B is not None and layer.tail_start_B is not None:
            self.start_B.copy_(layer.tail_start_B)
        if self.basis is not None and layer.basis is not None:
            for name, held in self.basis.stored.items():
                held.copy_(layer.basis.stored[name])
        if table is not None:
            assert self.fused.table is not None
            self.fused.table.take(table)
        layer.keys, layer.values, layer.tail_start_B, layer.basis = self.keys, self.values, self.start_B, self.basis
        layer.fused = self.fused

    def release(self, layer: PackedLayer) -> None:
        assert self.own is not None
        layer.keys, layer.values = (room[:, :, : layer.tail_length].clone() for room in (self.keys, self.values))
        layer.tail_start_B = None if self.start_B is None else self.start_B.clone()
        (layer.basis, layer.fused), self.own, layer.written = self.own, None, None


class CapturedStep:
    """A step of one token of every row, captured for all caches of its ``keys``, in whose ``shapes`` they are.

    Several caches, of one row each, share a step; the place of one that left is idle, until another takes it.
    """

    def __init__(self, backbone: CompressedBackbone, caches: Sequence[PackedCache], keys: Sequence[Key]) -> None:
        self.keys, rooms = list(keys), [room for room, _ in keys]
        self.shapes = list(map(OneShape, caches, rooms))
        counters = [each for shape in self.shapes for each in (shape.position, shape.written)]
        rows = sum(shape.position.shape[-2] for shape in self.shapes)
        self.ids_B1 = torch.zeros(rows, 1, dtype=torch.long, device=counters[0].device)
        self._order: list[int] = []
        for shape, cache in zip(self.shapes, caches, strict=True):
            shape.take(cache)
            cache.choose_pages(True)
        before = [counter.clone() for counter in counters]

        def step() -> Tensor:
            return next_logits(backbone, run_step(backbone, self.ids_B1, *caches))

        def again() -> None:
            for counter, value in zip(counters, before, strict=True):
                counter.copy_(value)

        try:
            with ExitStack() as appending:
                for cache in caches:
                    appending.enter_context(cache.appending())
                self.replay = capture(step, again, self.ids_B1.device)
        except BaseException:
            again()
            raise

    def holds(self, cache: PackedCache) -> bool:
        """Return whether a cache is here, with room for a token."""
        return cache.shape in self.shapes and cache.layers[0].tail_length < cache.shape.room

    def seat(self, caches: Collection[PackedCache], keys: Callable[[PackedCache], Key | None]) -> bool:
        """Let those that are not here move in; False, and nobody moves, where there is no place for each."""
        here = [cache for cache in caches if self.holds(cache)]
        free = [place for place, shape in enumerate(self.shapes) if shape.tenant not in here]
        moves = list[tuple[OneShape, PackedCache]]()
        for cache in (cache for cache in caches if cache not in here):
            place = next((place for place in free if self.keys[place] == keys(cache)), None)
            if place is None:
                return False
            free.remove(place)
            moves.append((self.shapes[place], cache))
        if any(None in self.shapes[place].tables for place in free):
            return False
        for shape, cache in moves:
            cache.free_shape()
            shape.take(cache)
            self._order = []
        return True

    @torch.no_grad()
    def __call__(self, ids_B1: Tensor, *caches: PackedCache) -> Tensor:
        """Append a token of every row of the caches that are here, [B, 1]; logits of the next one, [B, V]."""
        order = [self.shapes.index(cache.shape) for cache in caches]
        if order != self._order:
            self._order, self._places = order, torch.tensor(order, device=ids_B1.device)
            self._idle = [shape for place, shape in enumerate(self.shapes) if place not in order]
            for shape in self._idle:
                shape.rest()
        for counter in (each for shape in self._idle for each in (shape.written, shape.position)):
            counter.zero_()
        if len(self.shapes) == 1:
            self.ids_B1.copy_(ids_B1)
        else:
            self.ids_B1.index_copy_(0, self._places, ids_B1)
        logits_BV = self.replay()
        for layer in (layer for cache in caches for layer in cache.layers):
            layer.tail_length += 1
        return logits_BV if len(self.shapes) == 1 else logits_BV[self._places]


@torch.no_grad()
def capture(step: Callable[[], Tensor], again: Callable[[], None], device: torch.device) -> Callable[[], Tensor]:
    """Capture a step in a CUDA graph, after two that run before; ``again`` sets back what steps count."""
    with torch.cuda.device(device):
        stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        graph = torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
            again()
            before = torch.cuda.get_sync_debug_mode()
            torch.cuda.set_sync_debug_mode("error")  # what waits for the device is refused here, not in the capture
            try:
                step()
            finally:
                torch.cuda.set_sync_debug_mode(before)
            again()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads may go on
            logits_BV = step()

    def replay() -> Tensor:
        graph.replay()
        return logits_BV

    return replay


def captured_step(backbone: CompressedBackbone, *caches: PackedCache, captures: bool = True) -> CapturedStep | None:
    """Return the step of caches of which tokens are ``expected``, ready to run; None: it runs as it is called.

    Several are of one row each. Not ``captures``: none is made; they go into a step that has places for all.
    """
    family = backbone.family
    short = len(caches) == 1 and caches[0].expected < FEW
    if short or family.device.type not in DEVICES or any(cache.way.startswith(SLOWLY) for cache in caches):
        return None
    kept, known = _graphs.setdefault(family.model, []), dict[PackedCache, Key | None]()
    for cache in caches:
        warn_of_positions(backbone, cache, 1)

    def key(cache: PackedCache) -> Key | None:
        if cache not in known:
            known[cache] = _key(backbone, cache)
        return known[cache]

    kept.sort(key=lambda step: -sum(map(step.holds, caches)))  # else the last used first
    most = 2 * len(caches) if captures else 1 << 20
    fitting = (step for step in kept if len(caches) <= len(step.shapes) <= most)
    found = next((step for step in fitting if step.seat(caches, key)), None)
    if found is None and captures:
        keys = [each for each in map(key, caches) if each is not None]
        # one that rows share is large: there is one, and before the next is made it goes
        kept[:] = [step for step in kept if len(caches) == 1 or len(step.shapes) == 1][: KEPT - 1]
        if len(keys) == len(caches) and (found := _captured(backbone, caches, keys)) is not None:
            kept.insert(0, found)
    for cache in caches if found is not None else ():
        cache.way = "captured in a graph"
    return found


def _key(backbone: CompressedBackbone, cache: PackedCache) -> Key | None:
    cache.free_shape()
    if (reason := uncaptured(backbone, cache)) is not None:
        cache.way = f"{SLOWLY}{reason}"
        return None
    use_packed_attention(backbone.family.decoder.config)
    length = cache.layers[0].tail_length
    room = max(64, 1 << (max(length + 1, min(length + cache.expected, RESERVED)) - 1).bit_length())
    return room, (step_shape(cache, room), _weights(backbone.family))


def _captured(backbone: CompressedBackbone, caches: Sequence[PackedCache], keys: Sequence[Key]) -> CapturedStep | None:
    try:
        return CapturedStep(backbone, caches, keys)
    except RuntimeError as error:
        short = isinstance(error, torch.OutOfMemoryError)
        why = "memory does not suffice for a graph" if short else f"a step cannot be captured: {error}"
        for cache in caches:
            cache.free_shape()
            cache.way = f"{SLOWLY}{why.splitlines()[0]}"
        warnings.warn(f"the answer is decoded {caches[0].way}", SubTokenWarning, stacklevel=1)
        return None


def uncaptured(backbone: CompressedBackbone, cache: PackedCache) -> str | None:
    """Say in words why a step is not captured; None: it can be."""
    family = backbone.family
    decoder = family.decoder
    devices = {family.device, *(each.device for each in chain(cache.layers, decoder.parameters()))}
    hooks = chain.from_iterable((*m._forward_hooks.values(), *m._forward_pre_hooks.values()) for m in decoder.modules())
    # those that transformers leaves once states were asked for do nothing in a step
    hooked = any(getattr(each, "__module__", "") != "transformers.utils.output_capturing" for each in hooks)
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
    lora = ((*x.active_adapters, x.disable_adapters, x.merged, str(vars(x).get("scaling"))) for x in layers)
    return tuple(states.items()), tuple(lora), family.decoder.config._attn_implementation
