"""KVzap's calibration: nets that foretell KVzip's scores, learned from contexts that run through the model once more.

Source: ``kvzap/train.py`` of kvpress. The target of an entry is the log of its score under KVzip (``e**FAINTEST`` at
least), the input what its layer projected to queries, keys and values. The default is one linear map a layer by ridge
regression, in closed form over all entries; ``hidden`` makes it two layers with a GELU between, learned by AdamW over
``positions`` drawn entries of every context: mean squared error, cosine, batches of 512, gradient norms cut at 1, as in
the release. Inputs and targets are standardised while they are learned from; the nets then hold what undoes it.

KVzip+ (``normalise``) weighs a head's largest attention by what the value gives to the layer's output, over what the
layer reads: ``|W_o v| / |x|``. The release divides by the reading row's length before it takes the largest; here it is
the entry's own, which the row that says it again resembles.

Legend: B batch, M rows of a layer, n entries, D model width, W width between the layers, H query heads, h key-value
heads, d head width.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subtoken_train.cache.cache import PackedCache
from subtoken_train.calibrating.base import Batches, Calibrator, Progress
from subtoken_train.engine.attention import use_packed_attention
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.engine.prompt_pass import are_finite, check_states
from subtoken_train.errors import MAX_COUNT, no_numbers
from subtoken_train.evictions.kvzip import KVzip, TokenScorers, repeated_context
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.eviction_pass import EvictionPass
from subtoken_train.inference.layer_packer import LayerPacker
from subtoken_train.inference.prefill import contexts_of, run_whole
from subtoken_train.types import Batch, in_compressed_region
from subtoken_train.view.method import setting
from subtoken_train.view.scores import Scores
from subtoken_train.view.view import Need, View

FAINTEST = -12.0
BATCH, GRADIENT = 512, 1.0
NARROWEST = 1e-4  # standard deviation that an input or a target has at least


@dataclass(frozen=True)
class ScorerCalibrator(Calibrator):
    """Nets of all layers; see ``Calibrator`` for the other settings.

    Attributes:
        hidden: width between a net's two layers; 0: one linear map.
        normalise: foretell KVzip+'s scores.
        ridge: penalty on the squares of a map's weights, for each entry and of standardised inputs.
        positions: entries that are drawn of every context, where nets have two layers.
        epochs: passes over these.
        learning_rate: at the first step.
    """

    name: ClassVar[str] = "kvzap"
    any_text: ClassVar[bool] = True
    whole_caches: ClassVar[bool] = True

    samples: int = setting(16, 1, MAX_COUNT)
    batch_size: int = setting(1, 1, MAX_COUNT)
    context_length: int = setting(704, 1)
    hidden: int = setting(0, 0, 2**16)
    normalise: bool = False
    ridge: float = setting(0.1, 0, 1e6)
    positions: int = setting(500, 1, 2**20)
    epochs: int = setting(15, 1, 10_000)
    learning_rate: float = setting(5e-3, 0, 100)

    @torch.no_grad()
    def numbers(self, backbone: CompressedBackbone, batches: Batches, show: Progress | None = None) -> TokenScorers:
        use_packed_attention(backbone.family.decoder.config)
        fit: Fit = NetFit(self, backbone.family.device) if self.hidden else RidgeFit(self.ridge)
        for batch in batches:
            for layer, (input_nD, score_nh) in enumerate(kvzip_examples(backbone, contexts_of(batch), self.normalise)):
                if not bool(are_finite(input_nD) & are_finite(score_nh)):
                    raise no_numbers("while its entries were scored", backbone.model.dtype)
                fit.add(layer, input_nD, score_nh)
        nets = fit.nets(show)
        if not nets:
            raise ValueError("none of the prompts has a context to score; choose other data")
        return TokenScorers.of(nets)


@dataclass(frozen=True)
class NotingKVzip(KVzip):
    """KVzip that notes what every layer read, and weighs attention as KVzip+ does where it is asked to."""

    needs: ClassVar[frozenset[Need]] = KVzip.needs | {"inputs", "values"}

    normalise: bool = False
    weights: dict[int, Tensor] = field(default_factory=dict)

    def score(self, view: View) -> Scores:
        found = super().score(view)
        found.notes["input"] = view.input_BND
        if self.normalise:
            length_BM = view.input_BND.float().norm(dim=-1).clamp(min=NARROWEST)
            self.weights[view.layer] = output_lengths(view.value_BhNd, view.output_weight()) / length_BM[:, None]
        return found

    def weighed(self, view: View, largest_BHC: Tensor, index_BC: Tensor) -> Tensor:
        if not self.normalise:
            return largest_BHC
        return largest_BHC * self.weights[view.layer].gather(-1, index_BC[:, None].expand_as(largest_BHC))


def output_lengths(value_BhNd: Tensor, weight_DHd: Tensor) -> Tensor:
    """Length of W_o v for every query head, [B, H, N] in fp32."""
    heads, width = value_BhNd.shape[1], value_BhNd.shape[-1]
    weight_HdD = weight_DHd.float().T.reshape(-1, width, weight_DHd.shape[0])
    gram_Hdd = weight_HdD @ weight_HdD.transpose(-1, -2)
    value_BHNd = value_BhNd.float().repeat_interleave(len(weight_HdD) // heads, 1)
    return ((value_BHNd @ gram_Hdd) * value_BHNd).sum(-1).clamp(min=0).sqrt()


def kvzip_examples(backbone: CompressedBackbone, contexts: Batch, normalise: bool) -> list[tuple[Tensor, Tensor]]:
    """Per layer what it read of the contexts' entries, [n, D], and the logs of their scores, [n, h] in fp32."""
    compression = Compression(NotingKVzip(normalise=normalise), 0.5)
    compression.check(backbone.family)
    eviction = EvictionPass(compression, backbone.family, contexts)
    packer = LayerPacker(
        backbone, compression, PackedCache(backbone.family.shape.num_layers), contexts.input_ids_BN.shape[1]
    )
    result = run_whole(backbone, contexts, eviction, packer)
    check_states(result.hidden_BMD, result.rows.visible_BM, contexts.record_ids)
    found = []
    for layer in sorted(eviction.scores):
        scores = eviction.scores[layer]
        regions_BM = eviction.rows[layer].regions_BM
        marks_BM = repeated_context(regions_BM) & in_compressed_region(regions_BM).any(-1, keepdim=True)
        scores_nh = scores.scores_BhN.transpose(1, 2)[marks_BM].float()
        found.append((scores.notes["input"][marks_BM], scores_nh.clamp(min=math.exp(FAINTEST)).log()))
    return found


class Fit(ABC):
    """Learns a net for every layer."""

    @abstractmethod
    def add(self, layer: int, input_nD: Tensor, target_nh: Tensor) -> None:
        """Take some entries of a layer."""

    @abstractmethod
    def nets(self, show: Progress | None = None) -> list[list[Tensor]]:
        """The nets of all layers, see ``TokenScorers``; none where there were no entries."""


@dataclass
class Moments:
    """Sums over a layer's entries, fp64: of inputs, then targets, [D + h]; of the inputs' products with these."""

    count: int
    both_s: Tensor
    products_Ds: Tensor


class RidgeFit(Fit):
    """Ridge regression on standardised inputs, in closed form; ``ridge`` is the penalty for each entry."""

    def __init__(self, ridge: float) -> None:
        self.ridge = ridge
        self.moments: dict[int, Moments] = {}

    def add(self, layer: int, input_nD: Tensor, target_nh: Tensor) -> None:
        if not len(input_nD):
            return
        inputs = input_nD.double().cpu()
        both = torch.cat([inputs, target_nh.double().cpu()], 1)
        found = Moments(len(both), both.sum(0), inputs.T @ both)
        if (own := self.moments.setdefault(layer, found)) is not found:
            own.count += found.count
            own.both_s += found.both_s
            own.products_Ds += found.products_Ds

    def nets(self, show: Progress | None = None) -> list[list[Tensor]]:
        return [self._net(self.moments[layer]) for layer in sorted(self.moments)]

    def _net(self, own: Moments) -> list[Tensor]:
        width, mean_s = len(own.products_Ds), own.both_s / own.count
        apart_Ds = own.products_Ds / own.count - mean_s[:width, None] * mean_s
        deviation_D = apart_Ds[:, :width].diagonal().clamp(min=0).sqrt().clamp(min=NARROWEST)
        apart_Ds = apart_Ds / deviation_D[:, None]
        penalised_DD = apart_Ds[:, :width] / deviation_D + self.ridge * torch.eye(width, dtype=torch.float64)
        weight_Dh = torch.linalg.lstsq(penalised_DD, apart_Ds[:, width:]).solution / deviation_D[:, None]
        return [weight_Dh.T.float(), (mean_s[width:] - mean_s[:width] @ weight_Dh).float()]


class NetFit(Fit):
    """Nets of two layers, learned by AdamW from entries that are drawn."""

    def __init__(self, settings: ScorerCalibrator, device: torch.device) -> None:
        self.settings, self.device = settings, device
        self.draw = torch.Generator().manual_seed(settings.seed)
        self.examples: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def add(self, layer: int, input_nD: Tensor, target_nh: Tensor) -> None:
        chosen_n = torch.randperm(len(input_nD), generator=self.draw)[: self.settings.positions].to(input_nD.device)
        if len(chosen_n):
            self.examples.setdefault(layer, []).append((input_nD[chosen_n].cpu(), target_nh[chosen_n].cpu()))

    def nets(self, show: Progress | None = None) -> list[list[Tensor]]:
        found = []
        for layer in sorted(self.examples):
            parts = zip(*self.examples.pop(layer), strict=True)
            found.append(self._net(*(torch.cat(each).to(self.device).float() for each in parts)))
            if show is not None:
                show(len(found), len(found) + len(self.examples))
        return found

    @torch.enable_grad()
    def _net(self, input_nD: Tensor, target_nh: Tensor) -> list[Tensor]:
        settings = self.settings
        inputs, mean_D, deviation_D = _standardised(input_nD)
        targets, mean_h, deviation_h = _standardised(target_nh)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            first, second = nn.Linear(inputs.shape[1], settings.hidden), nn.Linear(settings.hidden, targets.shape[1])
        net = nn.Sequential(first, nn.GELU(), second).to(self.device)
        optimizer = torch.optim.AdamW(net.parameters(), lr=settings.learning_rate)
        steps = settings.epochs * -(-len(inputs) // BATCH)
        course = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        for _ in range(settings.epochs):
            for some_n in torch.split(torch.randperm(len(inputs), generator=self.draw).to(self.device), BATCH):
                loss = F.mse_loss(net(inputs[some_n]), targets[some_n])
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                nn.utils.clip_grad_norm_(net.parameters(), GRADIENT)
                optimizer.step()
                course.step()
        weight_WD = first.weight / deviation_D
        weight_hW, bias_h = second.weight * deviation_h[:, None], second.bias * deviation_h + mean_h
        return [each.detach().cpu() for each in (weight_WD, first.bias - weight_WD @ mean_D, weight_hW, bias_h)]


def _standardised(values_nk: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return values less their mean, over their deviation, and these two, [k]."""
    mean_k, deviation_k = values_nk.mean(0), values_nk.std(0, correction=0).clamp(min=NARROWEST)
    return (values_nk - mean_k) / deviation_k, mean_k, deviation_k
