"""Selectors: learned routers (linear and MLP, the paper's; bilinear, ours), and controls without parameters.

Legend: B batch, N positions, D model and value width, S value groups, g channels of a group, R rank.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subtoken_train.errors import refuse
from subtoken_train.functional.hashing import uniform_hash
from subtoken_train.functional.masks import contribution_norms, head_grams
from subtoken_train.functional.quantized import dense_weight, is_readable
from subtoken_train.ledger.kv_budget import KVShape
from subtoken_train.routing.base import RoutingConfig, Selector
from subtoken_train.view.view import View

INIT_STD = 0.02


def fp32_linear(layer: nn.Linear, inputs: Tensor) -> Tensor:
    """Compute ``layer(inputs)`` in fp32, whatever the parameters' dtype or the autocast around it."""
    with torch.autocast(inputs.device.type, enabled=False):
        bias = None if layer.bias is None else layer.bias.float()
        linear: Callable[..., Tensor] = F.linear if inputs.dtype == torch.float32 else _CastLinear.apply
        return linear(inputs, layer.weight.float(), bias)


class _CastLinear(torch.autograd.Function):
    """A linear map in fp32 of a half-precision input, which the backward pass keeps in the place of an fp32 copy."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        return F.linear(inputs.float(), weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor, Tensor | None]:
        inputs, weight = ctx.saved_tensors
        gradient = gradients[0].flatten(0, -2)
        of_inputs = (gradients[0] @ weight).to(inputs.dtype) if ctx.needs_input_grad[0] else None
        of_bias = gradient.sum(0) if ctx.needs_input_grad[2] else None
        return of_inputs, gradient.T @ inputs.flatten(0, -2).float(), of_bias


def init_router(module: nn.Module) -> None:
    """Draw weights from N(0, 0.02), so that ties do not favour the first groups; biases are 0."""
    for part in module.modules():
        if isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, std=INIT_STD)
            if part.bias is not None:
                nn.init.zeros_(part.bias)


class LinearRouter(Selector):
    """Linear router (paper, section 3.3 and appendix B.1): a_i = W h_i + b, one logit per value group.

    Optionally plus a linear map of the query summary. READING. The paper's h_i is "the layer input hidden state", here
    what ``v_proj`` reads, after the layer's norm; the bias, and weights from N(0, 0.02), are ours.
    """

    learned = True

    def __init__(self, hidden_size: int, config: RoutingConfig) -> None:
        super().__init__()
        self.query_conditioned = config.query_conditioned
        self.token = nn.Linear(hidden_size, config.num_groups)
        self.query = nn.Linear(hidden_size, config.num_groups, bias=False) if config.query_conditioned else None
        init_router(self)

    def forward(self, view: View) -> Tensor:
        logits_BNS = fp32_linear(self.token, view.hidden_BND)
        if self.query is None:
            return logits_BNS
        return logits_BNS + fp32_linear(self.query, view.query_summary_BD)[:, None]


class MLPRouter(Selector):
    """Two-layer MLP router (paper, section 4.4) over token and query. READING: width D/4, GELU and biases are ours."""

    learned = True

    def __init__(self, hidden_size: int, config: RoutingConfig) -> None:
        super().__init__()
        width = max(1, hidden_size // 4)
        self.query_conditioned = config.query_conditioned
        self.token = nn.Linear(hidden_size, width)
        self.query = nn.Linear(hidden_size, width, bias=False) if config.query_conditioned else None
        self.out = nn.Linear(width, config.num_groups)
        init_router(self)

    def forward(self, view: View) -> Tensor:
        features = fp32_linear(self.token, view.hidden_BND)
        if self.query is not None:
            features = features + fp32_linear(self.query, view.query_summary_BD)[:, None]
        return fp32_linear(self.out, F.gelu(features))


@torch.no_grad()
def start_from(router: LinearRouter | MLPRouter, net: Sequence[Tensor]) -> None:
    """Let every head's logits, of groups and key, start as one net (entries are whole), the query's part at 0.

    ``net`` holds weight and bias of each layer, the last ones of the key-value heads. ``ValueError``: other widths.
    """
    refuse((len(net) > 4, "these nets are gates, and no router starts as one; calibrate kvzap without sinks"))
    *inner, last = [router.token, router.out] if isinstance(router, MLPRouter) else [router.token]
    found, width = (sum(len(part) for part in parts) for parts in (net[1:-2:2], [layer.bias for layer in inner]))
    refuse((found != width, f"these nets are of 'hidden={found}', and this router starts from 'hidden={width}'"))
    groups = len(last.bias) // len(net[-1]) - 1
    spread = [torch.cat([part.repeat_interleave(groups, 0), part]) for part in net[-2:]]
    own = [part for layer in (*inner, last) for part in (layer.weight, layer.bias)]
    for part, given in zip(own, (*net[:-2], *spread), strict=True):
        part.copy_(given)
    if router.query is not None:
        router.query.weight.zero_()


class BilinearRouter(LinearRouter):
    """Bilinear router (ours): a_i = W h_i + b + E [(A h_i) * (C s_Q)], so that logits depend on the query.

    The paper's query conditioning (section 3.4) adds one number per group to all tokens of a sample. A and C are [R,
    D], E is [S, R], without biases, all drawn from N(0, 0.02): each of them has a gradient from the start.
    """

    def __init__(self, hidden_size: int, config: RoutingConfig) -> None:
        super().__init__(hidden_size, config)
        self.query_conditioned = True
        self.token_side = nn.Linear(hidden_size, config.query_rank, bias=False)
        self.query_side = nn.Linear(hidden_size, config.query_rank, bias=False)
        self.meeting = nn.Linear(config.query_rank, config.num_groups, bias=False)
        init_router(self)

    def forward(self, view: View) -> Tensor:
        query_BR = fp32_linear(self.query_side, view.query_summary_BD)
        token_BNR = fp32_linear(self.token_side, view.hidden_BND)
        return super().forward(view) + fp32_linear(self.meeting, token_BNR * query_BR[:, None])


class Control(Selector):
    """A selector without parameters, which keeps the routing's settings."""

    def __init__(self, hidden_size: int, config: RoutingConfig) -> None:
        super().__init__()
        self.config = config


class ValueNormSelector(Control):
    """Router-free control: keep the groups with the largest value norm ||v_g||_2. A strong control."""

    def forward(self, view: View) -> Tensor:
        norms_BNS: Tensor = torch.linalg.vector_norm(view.value_groups_BNSg.detach().float(), dim=-1)
        return norms_BNS


class OutputNormSelector(Control):
    """Router-free control (ours): keep the groups that add most to the layer's output, by the norm of W_o,g v_g."""

    reads_output = True

    def forward(self, view: View) -> Tensor:
        return view.output_norms()


class RandomSelector(Control):
    """Router-free control: groups at random, by a hash of seed and place."""

    def forward(self, view: View) -> Tensor:
        groups_S = torch.arange(view.value_groups_BNSg.shape[2], device=view.hidden_BND.device)
        sample_B11, position_BN1 = view.sample_seed_B[:, None, None], view.ordinal_BN[..., None]
        return uniform_hash(sample_B11, position_BN1, groups_S, self.config.seed, view.layer)


class StaticSelector(Control):
    """Router-free control: one fixed set per layer for all tokens, by (seed, layer, group), as if ``v_proj`` shrank."""

    same_for_all = True

    def forward(self, view: View) -> Tensor:
        batch, length, num_groups, _ = view.value_groups_BNSg.shape
        groups_S = torch.arange(num_groups, device=view.hidden_BND.device)
        return uniform_hash(groups_S, self.config.seed, view.layer).expand(batch, length, num_groups)


class LeadingSelector(Control):
    """Router-free control: the first groups of each head, the same for all tokens.

    Of values turned to their axes (``subtoken-train axes``), whose first channels hold the most, this is the low-rank
    cut of every value: what a choice for each token has to beat in the same bytes.
    """

    same_for_all = True

    def forward(self, view: View) -> Tensor:
        batch, length, num_groups, channels = view.value_groups_BNSg.shape
        order_S = torch.arange(num_groups, device=view.value_groups_BNSg.device)
        if self.config.layout == "contiguous":
            width = num_groups * channels // view.num_kv_heads
            places_Sg = torch.arange(num_groups * channels, device=order_S.device).view(num_groups, channels) % width
            order_S = places_Sg.sum(1).argsort(stable=True).argsort()
        return -order_S.float().expand(batch, length, num_groups)


class OutputNorms:
    """Contribution norms of every layer, from the Gram matrices (fp32, made when needed) of its output projection."""

    def __init__(self, projections: Sequence[nn.Module], config: RoutingConfig, shape: KVShape) -> None:
        self._projections = [_base_layer(projection) for projection in projections]
        self._config, self._shape = config, shape
        self._grams: dict[int, Tensor] = {}

    @torch.no_grad()
    def __call__(self, layer: int, value_BND: Tensor) -> Tensor:
        """Norms [B, N, S] in fp32 of a layer's value vectors, whole as ``v_proj`` gives them; no gradient."""
        config, shape = self._config, self._shape
        gram = self._grams.get(layer)
        if gram is None or gram.device != value_BND.device:
            weight = dense_weight(self._projections[layer], torch.float32).to(value_BND.device)
            gram = head_grams(weight, shape.num_kv_heads, shape.head_dim, config.num_groups, config.layout)
            self._grams[layer] = gram
        return contribution_norms(value_BND, gram, config.num_groups, config.layout)


def _base_layer(projection: nn.Module) -> nn.Module:
    layer: nn.Module = getattr(projection, "base_layer", projection)
    if not is_readable(layer):
        weight = getattr(layer, "weight", None)
        found = "no weight tensor" if weight is None else f"a weight of {str(weight.dtype).removeprefix('torch.')}"
        raise ValueError(f"output_norm needs an o_proj in floating point, nf4 or int8, not {found}: use value_norm")
    return layer
