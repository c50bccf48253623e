"""Value axes of a backbone: found on some prompts, and folded into its weights.

Legend: B batch, M rows of a layer, H query heads, h key-value heads, d head width, D model width.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from subtoken_train.engine.attention import use_packed_attention
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.engine.prompt_pass import Rows, are_finite
from subtoken_train.errors import no_numbers
from subtoken_train.families.family import Family
from subtoken_train.functional.key_axes import output_metric, value_axes
from subtoken_train.types import Batch

EXACT, ROUNDED = 1e-3, 0.3  # largest distance of the last states that passes, in fp32 and coarser, over their norm


def check_foldable(family: Family) -> None:
    """Raise ``ValueError`` unless a backbone's values go from ``v_proj`` to ``o_proj`` and nothing lies between."""
    if getattr(family.decoder.layers[0].self_attn, "v_norm", None) is not None:
        raise ValueError(f"{family.name} normalises its values, so they cannot be rotated; use the model as it is")
    for layer in range(family.shape.num_layers):
        for part in (family.projection(layer, "v").module, family.decoder.layers[layer].self_attn.o_proj):
            weight = getattr(part, "weight", None)
            if not isinstance(weight, Tensor) or not weight.is_floating_point():
                raise ValueError("value axes are folded into floating-point weights; name an unquantised backbone")


class Turned(NamedTuple):
    """Shares that half of the channels held, ``before`` and ``after``; ``apart``: how far the last states moved."""

    before: float
    after: float
    apart: float


@torch.no_grad()
def turn_values(backbone: CompressedBackbone, batches: Iterable[Batch], show: Callable[[int], None]) -> Turned:
    """Find value axes on prompts and fold them into a backbone without routers, reducer and LoRA."""
    read = iter(batches)
    if (first := next(read, None)) is None:
        raise ValueError("there are no prompts to find value axes on; choose other data")
    use_packed_attention(backbone.family.decoder.config)
    before = backbone.run(first, pad_left=True).hidden_BMD
    moments = ValueMoments()
    for done, batch in enumerate(chain([first], read), 1):
        backbone.run(batch, pad_left=True, observer=moments.observe)
        show(done)
    shares_before, shares_after = fold_value_axes(backbone.family, moments.means(backbone.model.dtype))
    after = backbone.run(first, pad_left=True).hidden_BMD
    apart = float((after.float() - before.float()).norm() / before.float().norm())
    if not apart <= (EXACT if before.dtype == torch.float32 else ROUNDED):
        why = f"its last states move by {apart:.0%}, so something lies between v_proj and o_proj"
        raise ValueError(f"{backbone.family.name}'s values cannot be rotated ({why}); use its own channels")
    return Turned(shares_before, shares_after, apart)


class ValueMoments:
    """Sums of v v^T over all entries of prompts, for every layer and head; observes ``CompressedBackbone.run``."""

    def __init__(self) -> None:
        self.sums, self.counts = dict[int, Tensor](), dict[int, int]()

    def observe(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, rows: Rows) -> None:
        """Take a layer's entries of a batch, but padding."""
        value_hnd = value.transpose(0, 1)[:, rows.visible_BM].float()
        self.sums[layer] = self.sums.get(layer, 0) + (value_hnd.transpose(-1, -2) @ value_hnd).double().cpu()
        self.counts[layer] = self.counts.get(layer, 0) + value_hnd.shape[1]

    def means(self, dtype: torch.dtype) -> list[Tensor]:
        """Return the means of all layers, [h, d, d] in fp64."""
        found = [self.sums[layer] / self.counts[layer] for layer in sorted(self.sums)]
        if not all(bool(are_finite(each)) for each in found):
            raise no_numbers("while its values were read", dtype)
        return found


@torch.no_grad()
def fold_value_axes(family: Family, moments: Sequence[Tensor]) -> tuple[float, float]:
    """Put value axes into the weights of ``v_proj`` and ``o_proj``; the model computes what it did, to rounding.

    ``config.value_axes`` names the maps afterwards: with other axes it is another backbone. Returned: what share of the
    values' mean squared output the first half of the channels holds, mean over layers, before and after.
    """
    digest, shares = hashlib.sha256(), []
    for layer, moment_hdd in enumerate(moments):
        metric_hdd = output_metric(family.output_weight(layer).cpu(), *moment_hdd.shape[:2])
        into_hdd, back_hdd = value_axes(moment_hdd, metric_hdd)
        projection, (heads, width) = family.projection(layer, "v"), into_hdd.shape[:2]
        linear: Any = projection.module
        for parameter in (linear.weight, linear.bias):
            if parameter is not None:
                own = parameter.data[projection.start : projection.stop]
                own.copy_((into_hdd @ own.double().cpu().reshape(heads, width, -1)).reshape(own.shape))
        weight = family.decoder.layers[layer].self_attn.o_proj.weight.data
        weight_hDGd = weight.double().cpu().reshape(len(weight), heads, -1, width).transpose(0, 1)
        weight.copy_((weight_hDGd @ back_hdd[:, None]).transpose(0, 1).reshape(weight.shape))
        products_hdd = moment_hdd * metric_hdd, into_hdd @ moment_hdd.double() @ into_hdd.transpose(-1, -2)
        squares = [each_hdd.diagonal(dim1=-2, dim2=-1) for each_hdd in products_hdd]
        shares.append(torch.stack([each_hd[:, : width // 2].sum() / each_hd.sum() for each_hd in squares]))
        digest.update(into_hdd.float().numpy().tobytes())
    family.model.config.value_axes = digest.hexdigest()
    before, after = torch.stack(shares).mean(0).tolist()
    return before, after
