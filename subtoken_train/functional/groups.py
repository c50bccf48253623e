"""Value groups: the two layouts of a value vector.

Legend: B batch, N positions, D value width d_v = H * d, H key-value heads, d head width, S groups.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

from subtoken_train.errors import check_word
from subtoken_train.types import Layout

if TYPE_CHECKING:
    from torch import Tensor


def check_groups(num_groups: int, kept_groups: int, num_kv_heads: int, head_dim: int, layout: Layout) -> None:
    """Refuse an S that does not divide the split width (d_v; ``per_head``: head_dim), and K outside of 1 to S."""
    check_word("layout", layout, get_args(Layout))
    width = num_kv_heads * head_dim if layout == "contiguous" else head_dim
    if num_groups < 1 or width % num_groups:
        near = [size for size in range(1, width + 1) if width % size == 0]
        near = sorted(sorted(near, key=lambda size: abs(size - num_groups))[:4])
        raise ValueError(
            f"num_groups={num_groups} does not divide the value width {width} ({layout} layout, {num_kv_heads} "
            f"key-value heads of {head_dim}); choose a divisor such as {', '.join(map(str, near))}"
        )
    if not 1 <= kept_groups <= num_groups:
        raise ValueError(f"kept_groups={kept_groups} must lie between 1 and num_groups={num_groups}")


def split_groups(value_BND: Tensor, num_groups: int, num_kv_heads: int, layout: Layout = "contiguous") -> Tensor:
    """View a value vector as groups, [B, N, D] -> [B, N, S, D/S].

    ``contiguous`` (paper, section 3.3): S contiguous pieces of the whole ``v_proj`` output, a group may be several
    heads or part of one. ``per_head``: group s is the s-th piece of *every* head, head after head.
    """
    *lead, width = value_BND.shape
    if layout == "contiguous":
        return value_BND.reshape(*lead, num_groups, width // num_groups)
    by_head = value_BND.reshape(*lead, num_kv_heads, num_groups, width // num_kv_heads // num_groups)
    return by_head.transpose(-3, -2).flatten(-2)


def expand_group_mask(group_mask_BNS: Tensor, value_dim: int, num_kv_heads: int, layout: Layout) -> Tensor:
    """Repeat a group mask over the channels it rules, [B, N, S] -> [B, N, D]."""
    num_groups = group_mask_BNS.shape[-1]
    if layout == "contiguous":
        return group_mask_BNS.repeat_interleave(value_dim // num_groups, dim=-1)
    per_head = group_mask_BNS.repeat_interleave(value_dim // num_kv_heads // num_groups, dim=-1)
    return per_head.repeat(*[1] * (per_head.dim() - 1), num_kv_heads)
