"""The FLOPs formula against torch's own count of a real model's matrix products."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from subtoken_train.ledger.flops import DecoderSize, TrainingFlops

SIZE = DecoderSize(hidden=32, intermediate=48, num_heads=4, num_kv_heads=2, head_dim=8, vocabulary=40)
LAYERS, BATCH, ROWS, RANK = 3, 2, 10, 4


class Adapted(torch.nn.Module):
    """A frozen projection with a trained low-rank addition."""

    def __init__(self, frozen: torch.nn.Linear) -> None:
        super().__init__()
        self.frozen = frozen
        self.down = torch.nn.Linear(frozen.in_features, RANK, bias=False)
        self.up = torch.nn.Linear(RANK, frozen.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(x) + self.up(self.down(x))


def adapted_llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=SIZE.hidden,
        intermediate_size=SIZE.intermediate,
        num_attention_heads=SIZE.num_heads,
        num_key_value_heads=SIZE.num_kv_heads,
        num_hidden_layers=LAYERS,
        vocab_size=SIZE.vocabulary,
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config).requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.v_proj = Adapted(layer.self_attn.v_proj)
    return model


def counted(first_trained: int) -> int:
    """Operations of one training step by torch's counter; eager attention, so all pairs and not half of them."""
    model = adapted_llama()
    for layer in model.model.layers[:first_trained]:
        layer.self_attn.v_proj.requires_grad_(False)
    ids = torch.randint(SIZE.vocabulary, (BATCH, ROWS))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("first_trained", [0, 1])
def test_against_the_counter_of_torch(first_trained):
    adapter = RANK * (SIZE.hidden + SIZE.num_kv_heads * SIZE.head_dim)
    flops = TrainingFlops(SIZE, [adapter if layer >= first_trained else 0 for layer in range(LAYERS)])
    lengths = torch.full((BATCH,), ROWS)
    formula = float(flops.layers(lengths, 0, LAYERS) + flops.head(lengths))
    # the counter sees whole attention matrices: add the pairs that causal kernels skip
    skipped = BATCH * ROWS * (ROWS - 1) / 2
    formula += skipped * sum(map(flops.per_pair, range(LAYERS)))
    # adapters that do not train still run forward
    formula += first_trained * 2 * adapter * BATCH * ROWS
    # the first trained layer's input needs no gradient: of its backward pass, only what lies behind v's adapter runs
    q_and_k = SIZE.hidden * SIZE.head_dim * (SIZE.num_heads + SIZE.num_kv_heads)
    v = SIZE.hidden * SIZE.head_dim * SIZE.num_kv_heads
    pairs = BATCH * ROWS * ROWS * 2 * SIZE.num_heads * SIZE.head_dim
    formula -= 2 * BATCH * ROWS * (q_and_k + v + RANK * SIZE.hidden)  # gradients of the layer's input
    formula -= 2 * pairs + pairs  # of the scores: towards q and k, and of the probabilities
    assert formula == counted(first_trained)


def test_layers_below_the_first_trained_one_run_forward_only():
    flops = TrainingFlops(SIZE, [0, 5, 0])
    weights = SIZE.layer_weights
    assert [flops.per_row(layer) for layer in range(3)] == [2 * weights, 4 * weights + 30, 4 * weights]
    assert flops.per_pair(1) == 3 * flops.per_pair(0) == 3 * 4 * SIZE.num_heads * SIZE.head_dim
