"""Axes of a layer's values: a basis in which few channels hold most of what values add to the layer's output.

A map of a head's values that ``o_proj`` undoes changes nothing. Here it is A = Q^T R: R, the square root of the mean of
``W_o^T W_o`` over the head's query heads, makes a value as long as the outputs that it stands for; the columns of Q,
principal axes of such values, order channels by their mean square (ours; compare SliceGPT, Ashkboos et al., 2024, and
Palu, Chang et al., 2024).

Legend: D model width, H query heads, h key-value heads, G = H / h, d head width; all matrices in fp64.
"""

from __future__ import annotations

import torch
from torch import Tensor

FLATTEST = 1e-6
"""Smallest eigenvalue of the outputs' metric, as a share of the largest: no axis is stretched without end."""


def output_metric(weight_DHd: Tensor, kv_heads: int, width: int) -> Tensor:
    """Return the mean of ``W_o^T W_o`` over each key-value head's H / h neighbouring query heads, [h, d, d]."""
    weight_hGDd = weight_DHd.double().reshape(len(weight_DHd), kv_heads, -1, width).permute(1, 2, 0, 3)
    return (weight_hGDd.transpose(-1, -2) @ weight_hGDd).mean(1)


def value_axes(moment_hdd: Tensor, metric_hdd: Tensor) -> tuple[Tensor, Tensor]:
    """Return the maps A of values and their inverses, [h, d, d] each; the sum of the channels' mean squares stays.

    ``moment_hdd``: second moments of each head's values, mean of v v^T.
    """
    found_hd, basis_hdd = torch.linalg.eigh(metric_hdd.double())
    largest_h1 = found_hd.amax(-1, keepdim=True)
    stretch_hd = found_hd.clamp(min=FLATTEST * largest_h1).where(largest_h1 > 0, torch.ones_like(found_hd)).sqrt()
    root_hdd = (basis_hdd * stretch_hd[:, None]) @ basis_hdd.transpose(-1, -2)
    inverse_hdd = (basis_hdd / stretch_hd[:, None]) @ basis_hdd.transpose(-1, -2)
    moment_hdd = moment_hdd.double()
    energy_hd, axes_hdd = torch.linalg.eigh(root_hdd @ moment_hdd @ root_hdd)
    axes_hdd, total_h = axes_hdd.flip(-1), energy_hd.sum(-1)
    before_h = moment_hdd.diagonal(dim1=-2, dim2=-1).sum(-1)
    scale_h = torch.where((total_h > 0) & (before_h > 0), before_h / total_h, torch.ones_like(total_h)).sqrt()
    into_hdd = axes_hdd.transpose(-1, -2) @ root_hdd * scale_h[:, None, None]
    return into_hdd, inverse_hdd @ axes_hdd / scale_h[:, None, None]


def first_half(moment_hdd: Tensor, metric_hdd: Tensor, into_hdd: Tensor) -> Tensor:
    """Return what share of the values' mean squared output the first half of the channels holds: before and after, [2].

    ``moment_hdd`` is of values before the map ``into_hdd``.
    """
    half = moment_hdd.shape[-1] // 2
    own_hd = (moment_hdd * metric_hdd).diagonal(dim1=-2, dim2=-1)
    mapped_hd = (into_hdd @ moment_hdd.double() @ into_hdd.transpose(-1, -2)).diagonal(dim1=-2, dim2=-1)
    return torch.stack([each_hd[:, :half].sum() / each_hd.sum() for each_hd in (own_hd, mapped_hd)])
