"""Cut keys: the channels that stay (ThinK), axes along which a cut loses least (RotateK); axes of values (ours).

**Channels.** A channel's score is the mean of q_d^2 over the last rows and the group's heads times the mean of k_d^2
over the cached keys, both rotated. Source: ThinK (Xu et al., 2024), as released (``key_pruner_query_driven``).

**Axes.** k' = (k - m) Q, q' = q Q. ``m`` and ``C`` are mean and covariance of the keys that are cut, of each key-value
head's own; ``w_d`` is the length of channel d over the last queries, averaged over the head's group first; the axes are
the eigenvectors of ``w_d C_de w_e``. Of a cut key the leading coordinates stay, and m in place of the others; ``q . m``
no softmax sees. Source: RotateK (Kang et al., 2026, arXiv 2605.19218), as released (``beomseokg/rotatek``). Not theirs:
keys of text are cut as well, but for the first token's; the eigenvectors are exact; *all* keys stand in the basis; Q is
stored as Householder reflections, as many as axes are cut or kept, whichever is fewer.

**Axes of values.** A map of a head's values that ``o_proj`` undoes changes nothing. Here it is A = Q^T R: R, the square
root of the mean of ``W_o^T W_o`` over the head's query heads, makes a value as long as the outputs that it stands for;
the columns of Q, principal axes of such values, order channels by their mean square. All in fp64.

Legend: B batch, N cached rows of the prompt, M kept entries, H query heads, h key-value heads, d head width, k kept
channels, r = min(k, d - k) mirrors; D model width, G = H / h.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from subtoken_train.functional.gather import kept_index, take_rows
from subtoken_train.types import KeyTurn

BLOCK = 4096  # entries whose squares exist at a time


def query_energy(query_BHNd: Tensor, rows_BN: Tensor, kv_heads: int, most: int | None = None) -> Tensor:
    """Return the mean square of marked rows' queries in each channel of a key-value head, [B, h, d]; 0 without rows."""
    mean_BHd = asking(query_BHNd, rows_BN, most).square().sum(1) / rows_BN.sum(-1).clamp(min=1)[:, None, None]
    return torch.unflatten(mean_BHd, 1, (kv_heads, -1)).mean(2)


def asking(query_BHNd: Tensor, rows_BN: Tensor, most: int | None = None) -> Tensor:
    """Return marked rows' queries, [B, W, H, d] in fp32, zeros behind fewer than W; ``most``: W, None reads it."""
    places_BW, asks_BW = kept_index(rows_BN, pad_left=False, longest=most)
    return take_rows(query_BHNd.transpose(1, 2), places_BW).float() * asks_BW[..., None, None]


def key_energy(key_BhNd: Tensor, rows_BM: Tensor, kept_BhM: Tensor) -> Tensor:
    """Return the mean square of each head's ``kept_BhM`` keys by channel, [B, h, d] in fp32; 0 where there is none."""
    total = key_BhNd.new_zeros(key_BhNd[:, :, 0].shape, dtype=torch.float32)
    for key, marks in in_blocks(key_BhNd, rows_BM, kept_BhM):
        total += (key.square() * marks).sum(2)
    return total / kept_BhM.sum(-1).clamp(min=1)[..., None]


def in_blocks(key_BhNd: Tensor, rows_BM: Tensor, kept_BhM: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield some entries' keys after others, [B, h, m, d] in fp32, and which of them heads keep, [B, h, m, 1]."""
    for start in range(0, rows_BM.shape[1], BLOCK):
        index_BM = rows_BM[:, start : start + BLOCK]
        key = key_BhNd.gather(2, index_BM[:, None, :, None].expand(-1, key_BhNd.shape[1], -1, key_BhNd.shape[3]))
        yield key.float(), kept_BhM[:, :, start : start + BLOCK, None]


LEAST = 1e-3  # least length of a channel of the queries, of its head's median one


def turn_of(
    key_BhNd: Tensor, rows_BM: Tensor, cut_BhM: Tensor, length_Bhd: Tensor, kept: int
) -> tuple[KeyTurn, Tensor]:
    """Return the basis of a layer whose marked keys are cut, and the channels that stay in it, bool [B, h, d]."""
    with torch.autocast(key_BhNd.device.type, enabled=False):  # in fp32 alone is the basis orthogonal
        centre_Bh1d, covariance_Bhdd = key_spread(key_BhNd, rows_BM, cut_BhM)
        axes_Bhdd = principal_axes(covariance_Bhdd, length_Bhd.masked_fill(cut_BhM.sum(-1, keepdim=True) <= kept, 1))
        mirrors_Bhdr, joint_Bhrr, channels_Bhd = mirrors_of(axes_Bhdd, kept)
    return KeyTurn(centre_Bh1d.half(), mirrors_Bhdr, joint_Bhrr), channels_Bhd


def query_lengths(query_BHNd: Tensor, rows_BN: Tensor, kv_heads: int, most: int | None = None) -> Tensor:
    """Return w: the length of each channel over the marked rows of the group's mean query, [B, h, d] in fp32."""
    pooled_BWhd = torch.unflatten(asking(query_BHNd, rows_BN, most), 2, (kv_heads, -1)).mean(3)
    length_Bhd = pooled_BWhd.square().sum(1).sqrt()
    return torch.maximum(length_Bhd, LEAST * length_Bhd.median(-1, keepdim=True).values)


def key_spread(key_BhNd: Tensor, rows_BM: Tensor, kept_BhM: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean [B, h, 1, d] and covariance [B, h, d, d] of ``kept_BhM`` keys, fp32; 0 where there is none."""
    batch, heads, _, width = key_BhNd.shape
    count = kept_BhM.sum(-1).clamp(min=1)[..., None, None]
    mean = key_BhNd.new_zeros(batch, heads, 1, width, dtype=torch.float32)
    for key, marks in in_blocks(key_BhNd, rows_BM, kept_BhM):
        mean += (key * marks).sum(2, keepdim=True)
    mean /= count
    square = key_BhNd.new_zeros(batch, heads, width, width, dtype=torch.float32)
    for key, marks in in_blocks(key_BhNd, rows_BM, kept_BhM):
        apart = (key - mean) * marks
        square += apart.mT @ apart
    return mean, square / count


def principal_axes(covariance_Bhdd: Tensor, length_Bhd: Tensor | None = None) -> Tensor:
    """Return the axes as columns, the one of most variance first, fp32 [B, h, d, d]; ``length_Bhd``: w, or None."""
    if length_Bhd is not None:
        covariance_Bhdd = covariance_Bhdd * length_Bhd[..., None] * length_Bhd[..., None, :]
    axes_Bhdd: Tensor = torch.linalg.eigh(covariance_Bhdd)[1]
    return axes_Bhdd.flip(-1)


def mirrors_of(axes_Bhdd: Tensor, kept: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return V, fp16 [B, h, d, r], and T, fp32 [B, h, r, r], that turn keys to their axes, and the channels that stay.

    The product of the reflections is I - V T V^T, and the inverse of T the upper triangle of V^T V with half of its
    diagonal (Puglisi, 1992). ``axes_Bhdd``: orthonormal columns, those that stay first.
    """
    width = axes_Bhdd.shape[-1]
    few = kept <= width - kept
    reflected, _ = torch.geqrf(axes_Bhdd[..., :kept] if few else axes_Bhdd[..., kept:])
    count, eye = reflected.shape[-1], torch.eye(width, device=reflected.device)
    mirrors_Bhdr = (reflected.tril(-1) + eye[:, :count]).half()
    stored = mirrors_Bhdr.float()
    product = stored.mT @ stored
    upper = product.triu(1) + torch.diag_embed(product.diagonal(dim1=-2, dim2=-1) / 2)
    joint_Bhrr = torch.linalg.solve_triangular(upper, eye[:count, :count].expand_as(upper), upper=True)
    first_d = torch.arange(width, device=reflected.device) < count
    return mirrors_Bhdr, joint_Bhrr, (first_d if few else ~first_d).expand(axes_Bhdd.shape[:-1])


def mirrored(vectors_Bhnd: Tensor, mirrors_Bhdr: Tensor, joint_Bhrr: Tensor) -> Tensor:
    """Return vectors times the product of the reflections, fp32; with a T that is transposed, back again."""
    own, mirrors, joint = (part.float().flatten(0, 1) for part in (vectors_Bhnd, mirrors_Bhdr, joint_Bhrr))
    with torch.autocast(vectors_Bhnd.device.type, enabled=False):
        return torch.baddbmm(own, own @ mirrors @ joint, mirrors.mT, alpha=-1).view(vectors_Bhnd.shape)


FLATTEST = 1e-6
"""Smallest eigenvalue of the outputs' metric, as a share of the largest: no axis is stretched without end."""


def output_metric(weight_DHd: Tensor, kv_heads: int, width: int) -> Tensor:
    """Return the mean of ``W_o^T W_o`` over each key-value head's H / h neighbouring query heads, [h, d, d]."""
    weight_hGDd = torch.unflatten(weight_DHd.double(), -1, (kv_heads, -1, width)).permute(1, 2, 0, 3)
    return (weight_hGDd.transpose(-1, -2) @ weight_hGDd).mean(1)


def value_axes(moment_hdd: Tensor, metric_hdd: Tensor) -> tuple[Tensor, Tensor]:
    """Return maps A of values and inverses, [h, d, d] each, by second moments; the mean squares' sum stays."""
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
