"""KVzap's calibration: nets that predict KVzip's scores, learned from contexts that run through the model once more.

Legend: n entries, D model width, W width between the layers of a net, h key-value heads, M rows of a layer.
"""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, count, islice
from pathlib import Path
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from safetensors.torch import load, save
from torch import Tensor, nn

from subtoken_train.calibrating.base import Batches, Calibrator, scored_prompts
from subtoken_train.engine.attention import use_packed_attention
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.engine.prompt_pass import are_finite
from subtoken_train.errors import MAX_COUNT, no_numbers, refuse
from subtoken_train.evictions.kvzip import GATE_WIDTH, KVzip, TokenScorers, gate_logs, repeated_context
from subtoken_train.functional.hashing import digest_of
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.prefill import contexts_of
from subtoken_train.outputs import write_whole
from subtoken_train.types import Batch, in_compressed_region
from subtoken_train.view.method import setting
from subtoken_train.view.scores import Scores
from subtoken_train.view.view import Need, View

FAINTEST = -12.0
NARROWEST = 1e-4  # standard deviation that an input or a target has at least
HELD_OUT = 10  # of so many batches the first is not learned from, and says when a net of two layers is best

Examples = list[tuple[Tensor, Tensor]]
"""Per layer what it read of some entries, [n, D], and the logs of their scores, [n, h] in fp32."""


@dataclass(frozen=True)
class ScorerCalibrator(Calibrator):
    """KVzap's nets, which predict KVzip's scores; see ``Calibrator`` for the other settings.

    Source: ``kvzap/train.py`` of kvpress. Contexts run through the model once more; the target of an entry is the log
    of its score under KVzip (``e**FAINTEST`` at least), the input what its layer projected to queries, keys and values.
    One linear map a layer by ridge regression; or two layers with a GELU between, of the epoch that errs least on every
    tenth batch of prompts. Both are standardised, which the nets undo. KVzip+'s scores gained nothing. Or, as released,
    Fast KVzip's gate: ``STEPS`` steps of SGD on the cross-entropy of the scores themselves (``optim.py`` @33de2a5).

    Attributes:
        ridge: penalty on the squares of a map's weights, for each entry.
        hidden: width between the two layers; 0: one linear map.
        sinks: learned keys beside which a gate weighs each token's own, in the release 16; 0: no gate.
        positions: entries that are drawn of a batch of prompts; 0: all.
        targets: folder that keeps them and their scores, a file for each batch of a model's prompts. Empty: none.
    """

    name: ClassVar[str] = "kvzap"
    any_text: ClassVar[bool] = True
    whole_caches: ClassVar[bool] = True

    samples: int = setting(16, 1, MAX_COUNT)
    batch_size: int = setting(1, 1, MAX_COUNT)
    context_length: int = setting(704, 1)
    ridge: float = setting(0.1, 0, 1e6)
    hidden: int = setting(0, 0, 2**16)
    sinks: int = setting(0, 0, 2**10)
    positions: int = setting(0, 0, 2**20)
    targets: str = ""

    @torch.no_grad()
    def numbers(self, backbone: CompressedBackbone, batches: Batches) -> TokenScorers:
        refuse((bool(self.hidden and self.sinks), "kvzap hidden is of a net and sinks are of a gate; set one of them"))
        moments, drawn, learns = dict[int, Moments](), list[Examples](), bool(self.hidden or self.sinks)
        for examples in self.examples(backbone, batches):
            if learns:
                drawn.append(examples)
            for layer, own in enumerate(Moments.of(*each) for each in (() if learns else examples)):
                moments[layer] = moments[layer] + own if layer in moments else own
        counts = [own.count for own in moments.values()] or [len(each[0][0]) for each in drawn]
        refuse((not any(counts), "none of the prompts has a context to score; choose other data"))
        if not learns:
            return TokenScorers.of([moments[layer].ridge_map(self.ridge) for layer in sorted(moments)])
        if self.sinks:
            layers = [layer_examples(drawn, layer, backbone.family.device) for layer in range(len(drawn[0]))]
            group = backbone.family.decoder.config.num_attention_heads // layers[0][1].shape[1]
            return TokenScorers.of([gate(*each, group, self.sinks, self.seed) for each in layers])
        if not any(counts[::HELD_OUT]) or sum(counts) == sum(counts[::HELD_OUT]):
            raise ValueError("kvzap hidden needs two batches of prompts at least, since one is held out")
        device, held = backbone.family.device, drawn[::HELD_OUT]
        kept = [each for place, each in enumerate(drawn) if place % HELD_OUT]
        parts = [[layer_examples(some, layer, device) for some in (kept, held)] for layer in range(len(held[0]))]
        return TokenScorers.of([two_layers(learned, tried, self.hidden, self.seed) for learned, tried in parts])

    def examples(self, backbone: CompressedBackbone, batches: Batches) -> Iterator[Examples]:
        """Yield examples of each batch of prompts: made, or read where the folder of targets has them."""
        use_packed_attention(backbone.family.decoder.config)
        weights = digest_of("", backbone.model.state_dict().items() if self.targets else ())
        for batch in batches:
            contexts = contexts_of(batch)
            parts = ("ids", contexts.input_ids_BN), ("regions", contexts.regions_BN)
            own = digest_of(f"{FAINTEST} {self.positions} {self.seed}", parts)
            file = Path(self.targets) / f"{hashlib.sha256(weights.digest() + own.digest()).hexdigest()}.targets"
            if self.targets and file.exists():
                yield read_targets(file)
                continue
            found = kvzip_examples(backbone, contexts)
            if not all(bool(are_finite(input_nD) & are_finite(score_nh)) for input_nD, score_nh in found):
                raise no_numbers("while its entries were scored", backbone.model.dtype)
            if self.positions:
                draw = torch.Generator().manual_seed(int.from_bytes(own.digest()[:7]))
                chosen_n = torch.randperm(len(found[0][0]), generator=draw)[: self.positions]
                found = [(x[chosen_n.to(x.device)], y[chosen_n.to(y.device)]) for x, y in found]
            if self.targets:
                content = save({f"{n:06}": x.cpu().clone() for n, x in enumerate(chain(*found))})
                write_whole(file, hashlib.sha256(content).digest() + content)
            yield found


def read_targets(path: Path) -> Examples:
    """Read examples, on the CPU, from a file that begins with their SHA-256."""
    content = path.read_bytes()
    if hashlib.sha256(content[32:]).digest() != content[:32]:
        raise ValueError(f"{path} is damaged: its content is not what was written; remove it, and it is made again")
    parts = [tensor for _, tensor in sorted(load(content[32:]).items())]
    return list(zip(parts[::2], parts[1::2], strict=True))


def layer_examples(some: list[Examples], layer: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return a layer's inputs and targets of several batches, [n, D] and [n, h] in fp32."""
    inputs, targets = zip(*(each[layer] for each in some), strict=True)
    return torch.cat(inputs).to(device).float(), torch.cat(targets).to(device)


@torch.enable_grad()
def two_layers(
    learned: tuple[Tensor, Tensor], held: tuple[Tensor, Tensor], hidden: int, seed: int, epochs: int = 15
) -> list[Tensor]:
    """Return a net of two layers, see ``TokenScorers``: of the epoch that errs least on ``held``."""
    (inputs, mean_D, deviation_D), (targets, mean_h, deviation_h) = map(unit_scale, learned)
    held_input, held_target = (held[0] - mean_D) / deviation_D, (held[1] - mean_h) / deviation_h
    draw = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        first, second = nn.Linear(inputs.shape[1], hidden), nn.Linear(hidden, targets.shape[1])
    net = nn.Sequential(first, nn.GELU(), second).to(inputs.device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=5e-3)
    course = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * -(-len(inputs) // 512))
    best, least = list[Tensor](), math.inf
    for _ in range(epochs):
        for some_n in torch.split(torch.randperm(len(inputs), generator=draw).to(inputs.device), 512):
            optimizer.zero_grad()
            F.mse_loss(net(inputs[some_n]), targets[some_n]).backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            course.step()
        with torch.no_grad():
            error = float(F.mse_loss(net(held_input), held_target))
        if not best or error < least:
            best, least = [each.detach().clone() for each in net.parameters()], error
    weight_WD, weight_hW = best[0] / deviation_D, best[2] * deviation_h[:, None]
    return [weight_WD, best[1] - weight_WD @ mean_D, weight_hW, best[3] * deviation_h + mean_h]


STEPS, AT_ONCE = 5000, 1000


@torch.enable_grad()
def gate(input_nD: Tensor, target_nh: Tensor, group: int, sinks: int, seed: int) -> list[Tensor]:
    """Return a gate of ``group`` queries a head, see ``TokenScorers``; targets are logs."""
    (width, heads), draw = (input_nD.shape[1], target_nh.shape[1]), torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        query, key = (nn.Linear(width, heads * each * GATE_WIDTH) for each in (group, 1))
    zeros = torch.zeros(heads, sinks, GATE_WIDTH), torch.zeros(heads, group)
    start = query.weight, query.bias, key.weight, torch.ones(2, GATE_WIDTH), *zeros
    net = [each.detach().to(input_nD.device).requires_grad_() for each in start]
    optimizer = torch.optim.SGD(net, lr=0.2, momentum=0.9)
    batches = (torch.split(torch.randperm(len(input_nD), generator=draw), AT_ONCE) for _ in count())
    for step, some_n in enumerate(islice(chain.from_iterable(batches), STEPS)):
        rate = 0.01 * step if step < STEPS / 100 else 1 if step < STEPS / 2 else 0.5 if step < STEPS * 0.75 else 0.25
        optimizer.param_groups[0]["lr"] = 0.2 * rate
        optimizer.zero_grad()
        found_nh = gate_logs(net, input_nD[some_n]).exp().clamp(max=1)
        loss = heads * F.binary_cross_entropy(found_nh, target_nh[some_n].exp().clamp(max=1))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return [each.detach() for each in net]


def unit_scale(values_nk: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return values less their mean, over their deviation, and these two, [k]."""
    mean_k, deviation_k = values_nk.mean(0), values_nk.std(0, correction=0).clamp(min=NARROWEST)
    return (values_nk - mean_k) / deviation_k, mean_k, deviation_k


@dataclass(frozen=True)
class NotingKVzip(KVzip):
    """KVzip that notes what every layer read."""

    needs: ClassVar[frozenset[Need]] = KVzip.needs | {"inputs"}

    def score(self, view: View) -> Scores:
        found = super().score(view)
        found.notes["input"] = view.input_BND
        return found


def kvzip_examples(backbone: CompressedBackbone, contexts: Batch) -> Examples:
    """Return examples of all entries of contexts."""
    compression = Compression(NotingKVzip(), 0.5)
    compression.check(backbone.family)
    eviction = scored_prompts(backbone, compression, contexts)
    found = []
    for layer in sorted(eviction.scores):
        scores, regions_BM = eviction.scores[layer], eviction.rows[layer].regions_BM
        marks_BM = repeated_context(regions_BM) & in_compressed_region(regions_BM).any(-1, keepdim=True)
        scores_nh = scores.scores_BhN.transpose(1, 2)[marks_BM].float()
        found.append((scores.notes["input"][marks_BM], scores_nh.clamp(min=math.exp(FAINTEST)).log()))
    return found


@dataclass(frozen=True)
class Moments:
    """Sums over a layer's entries, fp64: of inputs, then targets, [D + h]; of the inputs' products with these."""

    count: int
    both_s: Tensor
    products_Ds: Tensor

    @classmethod
    def of(cls, input_nD: Tensor, target_nh: Tensor) -> Self:
        """Sum up some entries."""
        inputs = input_nD.double().cpu()
        both = torch.cat([inputs, target_nh.double().cpu()], 1)
        return cls(len(both), both.sum(0), inputs.T @ both)

    def __add__(self, other: "Moments") -> "Moments":
        return Moments(self.count + other.count, self.both_s + other.both_s, self.products_Ds + other.products_Ds)

    def ridge_map(self, ridge: float) -> list[Tensor]:
        """Return weight [h, D] and bias [h] of the ridge regression on standardised inputs."""
        width, mean_s = len(self.products_Ds), self.both_s / self.count
        apart_Ds = self.products_Ds / self.count - mean_s[:width, None] * mean_s
        deviation_D = apart_Ds[:, :width].diagonal().clamp(min=0).sqrt().clamp(min=NARROWEST)
        apart_Ds = apart_Ds / deviation_D[:, None]
        penalised_DD = apart_Ds[:, :width] / deviation_D + ridge * torch.eye(width, dtype=torch.float64)
        weight_Dh = torch.linalg.lstsq(penalised_DD, apart_Ds[:, width:]).solution / deviation_D[:, None]
        return [weight_Dh.T.float(), (mean_s[width:] - mean_s[:width] @ weight_Dh).float()]
