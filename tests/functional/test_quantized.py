"""4- and 8-bit weights: their shapes, values and bytes are those of the matrices that bitsandbytes holds."""

import pytest
import torch
from torch import nn

from subtoken_train.functional.quantized import dense_shape, dense_weight, is_readable, quantised_bytes

bnb = pytest.importorskip("bitsandbytes")
SHAPES = [(64, 64), (96, 128), (704, 256), (33, 50)]


def linear(kind: str, rows: int, columns: int) -> tuple[nn.Module, torch.Tensor]:
    """A quantised layer, and the weight that it was made of."""
    torch.manual_seed(rows)
    weight = torch.randn(rows, columns) * 0.1
    if kind == "none":
        layer = nn.Linear(columns, rows, bias=False)
        layer.weight = nn.Parameter(weight)
    elif kind == "nf4":
        layer = bnb.nn.Linear4bit(columns, rows, bias=False, quant_type="nf4", compress_statistics=True)
        layer.weight = bnb.nn.Params4bit(weight, quant_type="nf4", compress_statistics=True).to("cpu")
    else:
        layer = bnb.nn.Linear8bitLt(columns, rows, bias=False, has_fp16_weights=False, threshold=6.0)
        layer.weight = bnb.nn.Int8Params(weight, requires_grad=False).to("cpu")
    return layer.eval(), weight


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("kind", "bits"), [("none", 32), ("nf4", 4), ("int8", 8)])
def test_a_weight_reads_back_to_within_a_step(kind, bits, shape):
    layer, weight = linear(kind, *shape)
    assert is_readable(layer)
    assert dense_shape(layer.weight) == shape
    read = dense_weight(layer, torch.float32)
    assert read.dtype == torch.float32
    assert read.shape == shape
    assert (read - weight).abs().max() <= {32: 0, 4: 0.2, 8: 0.6 / 127}[bits] * weight.abs().max()


def test_an_8_bit_weight_reads_the_same_after_its_first_pass():
    layer, _ = linear("int8", 96, 128)
    before = dense_weight(layer, torch.float32)
    layer(torch.randn(2, 128, dtype=torch.float16))
    assert layer.weight.SCB is None  # moved into the layer's state
    assert is_readable(layer)
    assert torch.equal(dense_weight(layer, torch.float32), before)


@pytest.mark.parametrize("shape", SHAPES)
def test_bytes_are_those_that_are_held(shape):
    state = linear("nf4", *shape)[0].weight
    tensors = [state, state.quant_state.absmax, state.quant_state.code, state.quant_state.offset]
    tensors += [state.quant_state.state2.absmax, state.quant_state.state2.code]
    assert quantised_bytes(shape, "nf4") == sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    weight = linear("int8", *shape)[0].weight
    assert quantised_bytes(shape, "int8") == weight.numel() + 4 * weight.SCB.numel()


def test_other_quantised_weights_are_not_read():
    module = nn.Module()
    assert not is_readable(module)
    module.weight = nn.Parameter(torch.zeros(4, 1, dtype=torch.uint8), requires_grad=False)
    assert not is_readable(module)
