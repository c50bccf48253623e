"""Attention and keys of a vision tower's patches, recomputed for one layer: the rest keeps its fast attention.

Families with a class token (CLIP, InternViT) read what it pays to each patch. Without one (SigLIP, Qwen) a patch counts
by the attention that it receives from its own tile or image, summed over patches, averaged over heads, as keys are. For
SigLIP this is our reading: VisionZip's release has no such tower.

Legend: I tiles (or frames), N a class token and P patches of a tile, T tokens of n merged patches each, C width of the
features, c any width, H heads, d head width.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from subtoken_train.forks import undoing


def with_inputs(module: Any, run: Callable[[], Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Run a tower, and return what it made and the arguments of its one call of a module."""
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    with undoing(module.register_forward_pre_hook(lambda _, *given: calls.append(given), with_kwargs=True).remove):
        made = run()
    ((args, options),) = calls
    return made, args, options


@torch.no_grad()
def class_attention(attention: Any, normed_INC: Tensor, heads: int | None = None) -> tuple[Tensor, Tensor]:
    """Recompute the class token's attention to every patch in a layer of CLIP's or InternViT's, and keys.

    ``heads``: parts to split queries and keys into; None: the layer's own. Returns (received [I, P], summed over heads;
    keys [I, P, d], averaged over heads), both in fp32.
    """
    query_IC, keys_INC = attention.q_proj(normed_INC[:, 0]), attention.k_proj(normed_INC)
    if hasattr(attention, "q_norm"):
        query_IC, keys_INC = attention.q_norm(query_IC), attention.k_norm(keys_INC)
    split = (attention.num_heads if heads is None else heads, -1)
    query_IHd, keys_INHd = query_IC.unflatten(-1, split).float(), keys_INC.unflatten(-1, split).float()
    with torch.autocast(query_IHd.device.type, enabled=False):
        scores_IHN = torch.einsum("ihd,inhd->ihn", query_IHd, keys_INHd) * query_IHd.shape[-1] ** -0.5
    return scores_IHN.softmax(-1).sum(1)[:, 1:], keys_INHd[:, 1:].mean(2)


def received_attention(query_PHd: Tensor, key_PHd: Tensor, lengths: list[int], scale: float) -> Tensor:
    """Return the attention each patch receives from its own image, summed over queries, averaged over heads, [P].

    In fp32, one head of one image at a time: no tensor is larger than n x n for an image of n patches (``lengths``).
    """
    queries, keys = torch.split(query_PHd.float(), lengths), torch.split(key_PHd.float(), lengths)
    received = []
    for query_nHd, key_nHd in zip(queries, keys, strict=True):
        total_n = torch.zeros(len(key_nHd), device=key_nHd.device)
        for query_nd, key_nd in zip(query_nHd.unbind(1), key_nHd.unbind(1), strict=True):
            with torch.autocast(key_nd.device.type, enabled=False):
                total_n += (query_nd @ key_nd.T * scale).softmax(-1).sum(0)
        received.append(total_n / key_nHd.shape[1])
    return torch.cat(received)


@torch.no_grad()
def patch_features(tower: Any, pixels: Tensor, layers: list[int]) -> Tensor:
    """Return a SigLIP tower's hidden states of the chosen layers (0: the embeddings) side by side, [I, P, C]."""
    states = tower(pixels, output_hidden_states=layers).hidden_states
    return torch.cat([states[layer] for layer in layers], -1)


@torch.no_grad()
def features_with_statistics(tower: Any, pixels: Tensor, layers: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``patch_features`` and ``with_statistics`` of the layer that made them (of several, the last named)."""
    depth = len(tower.encoder.layers)
    if (made_by := layers[-1] % (depth + 1) - 1) < 0:
        raise ValueError(f"vision_feature_layer must be past the embeddings, not {layers[-1]} of {depth} layers")
    return with_statistics(tower.encoder.layers[made_by].self_attn, lambda: patch_features(tower, pixels, layers))


@torch.no_grad()
def with_statistics(attention: Any, run: Callable[[], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Run a SigLIP tower and recompute one layer's attention received [I, P] and keys [I, P, d], both in fp32."""
    features, _, options = with_inputs(attention, run)
    normed_IPC = options["hidden_states"]
    tiles, patches = normed_IPC.shape[:2]
    heads = (attention.num_heads, attention.head_dim)
    query_PHd, key_PHd = (part(normed_IPC).reshape(-1, *heads) for part in (attention.q_proj, attention.k_proj))
    received_P = received_attention(query_PHd, key_PHd, [patches] * tiles, attention.scale)
    return features, received_P.view(tiles, patches), key_PHd.float().mean(1).view(tiles, patches, -1)


def merged_statistics(
    merge: Callable[[Tensor], Tensor], received_IP: Tensor, keys_IPd: Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    """Return what merged tokens receive, [T] of each tile, and their keys, [T, d]: means over patches (our reading).

    ``merge`` puts the channels of a token's patches side by side, [I, P, c] to [I, T, n * c].
    """
    merged_ITC = merge(keys_IPd)
    keys_ITd = merged_ITC.view(*merged_ITC.shape[:2], -1, keys_IPd.shape[-1]).mean(-2)
    return list(merge(received_IP[..., None]).mean(-1)), list(keys_ITd)
