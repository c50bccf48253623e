"""A SigLIP tower's patches, and what VisionZip reads of them, recomputed for one layer.

The tower keeps its fast attention. There is no class token: a patch counts by the attention that it receives from the
patches of its own tile, in the layer that made the features, summed over them and averaged over heads. Keys are that
layer's, averaged over heads. This is our reading: VisionZip's release has no SigLIP tower.

Legend: I tiles (or frames), P patches of a tile, C width of the features, H heads, d head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from subtoken_train.families.qwen_tower import received_attention
from subtoken_train.forks import undoing


@torch.no_grad()
def patch_features(tower: Any, pixels: Tensor, layers: list[int]) -> Tensor:
    """Hidden states of the chosen layers side by side, [I, P, C]; the others are not held.

    Args:
        tower: a ``SiglipVisionModel``.
        pixels: its input, [I, 3, height, width].
        layers: as transformers counts them, 0 being the embeddings; negative ones from the last.
    """
    states = tower(pixels, output_hidden_states=layers).hidden_states
    return torch.cat([states[layer] for layer in layers], -1)


@torch.no_grad()
def features_with_statistics(tower: Any, pixels: Tensor, layers: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """The same with what the layer that made them says of each patch; of several layers, the last named.

    Returns:
        (features [I, P, C], attention received [I, P], keys [I, P, d]), the last two in fp32.

    Raises:
        ValueError: the features are the embeddings, which no layer made.
    """
    depth = len(tower.encoder.layers)
    made_by = layers[-1] % (depth + 1) - 1
    if made_by < 0:
        raise ValueError(
            "a reducer in the tower needs a vision_feature_layer past the embeddings; this backbone has "
            f"{layers[-1]} of a tower of {depth} layers"
        )
    attention, inputs = tower.encoder.layers[made_by].self_attn, []
    hook = attention.register_forward_pre_hook(
        lambda _module, _args, options: inputs.append(options["hidden_states"]), with_kwargs=True
    )
    with undoing(hook.remove):
        features_IPC = patch_features(tower, pixels, layers)
    (normed_IPC,) = inputs
    tiles, patches = normed_IPC.shape[:2]
    heads = (attention.num_heads, attention.head_dim)
    query_PHd, key_PHd = (part(normed_IPC).reshape(-1, *heads) for part in (attention.q_proj, attention.k_proj))
    received_P = received_attention(query_PHd, key_PHd, [patches] * tiles, attention.scale)
    keys_Pd = key_PHd.float().mean(1)
    return features_IPC, received_P.view(tiles, patches), keys_Pd.view(tiles, patches, -1)
