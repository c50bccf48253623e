"""Recompute what VisionZip reads for a Qwen-VL tower's last block, so that the tower keeps its fast attention.

There is no class token: a patch counts by the attention it receives, summed over the patches of its own image (of a
video: of its own layer of two frames, as the towers attend) and averaged over heads; a visual token is the mean of its
merge group. Keys are taken after the rotary embedding, as in
VisionZip's Qwen2.5-VL release, and averaged over the group, then over heads. Unlike that release's flash path, the
images of a batch never attend to each other.

Legend: P patches of all images in the tower's window order, T visual tokens of all images, C width of a token, H heads,
d head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import apply_rotary_pos_emb_vision
from transformers.vision_utils import get_vision_window_index

from subtoken_train.families.towers import received_attention
from subtoken_train.forks import undoing


@torch.no_grad()
def tower_with_statistics(tower: Any, patches: Tensor, grid_I3: Tensor) -> tuple[Any, Tensor, Tensor]:
    """Run the tower and read its last block.

    Args:
        tower: Qwen2-VL's, Qwen2.5-VL's or Qwen3-VL's.
        patches: its input, [P, channels * pixels of a patch].
        grid_I3: (time, height, width) of every image in patches.

    Returns:
        (the tower's output, attention received [T], keys [T, d]), the last two in fp32, in raster order.

    Raises:
        ValueError: the last block attends within windows only.
    """
    last = len(tower.blocks) - 1
    windows = getattr(tower, "window_size", None) is not None
    if windows and last not in tower.fullatt_block_indexes:
        raise ValueError(
            f"visionzip needs a Qwen2.5-VL tower whose last block, {last}, attends to the whole image; this one has "
            f"full attention in blocks {list(tower.fullatt_block_indexes)}"
        )
    attention, calls = tower.blocks[last].attn, []
    hook = attention.register_forward_pre_hook(
        lambda _module, args, options: calls.append((args[0], options)), with_kwargs=True
    )
    with undoing(hook.remove):
        made = tower(patches, grid_thw=grid_I3)
    ((normed, options),) = calls
    query_PHd, key_PHd, _ = attention.qkv(normed).unflatten(-1, (3, attention.num_heads, -1)).unbind(1)
    query_PHd, key_PHd = apply_rotary_pos_emb_vision(query_PHd, key_PHd, *options["position_embeddings"])
    lengths = options["cu_seqlens"].diff().tolist()
    received_P = received_attention(query_PHd, key_PHd, lengths, attention.scaling)
    window_index_T = torch.arange(len(made.pooler_output))
    if windows:
        window_index_T, _ = get_vision_window_index(
            grid_I3, tower.spatial_merge_size, window_size=tower.window_size, patch_size=tower.patch_size
        )
    return made, per_token(received_P, window_index_T), per_token(key_PHd, window_index_T).mean(1)


def per_token(values_P: Tensor, window_index_T: Tensor) -> Tensor:
    """Average the patches of each visual token, [P, ...] to [T, ...] in fp32, from window order to raster order.

    ``window_index_T``: the raster place of the token that stands at each place of the window order.
    """
    merged_T = values_P.float().reshape(len(window_index_T), -1, *values_P.shape[1:]).mean(1)
    return merged_T[window_index_T.argsort().to(merged_T.device)]
