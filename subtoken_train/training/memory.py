"""A first estimate of training memory on one device. Simple on purpose; it says what it counts and what it leaves out.

Counted, for a batch of B records of ``max_length`` tokens, one image each, M rows left after the reducer:

* weights: frozen tensors in the backbone's dtype (e bytes);
* adapters: trained tensors in fp32, 4 bytes; as much for their gradients; twice as much for AdamW's two moments;
* activations of one layer and row: e * (10 D + 3 d_v + 4 F) + 12 D, with D hidden, d_v value and F MLP width. 10 D: two
  norms at 4 D each (input, output, and an fp32 copy of the input, which counts twice), query, attention output. 3 d_v:
  key, value, routed value. 4 F: gate, its SiLU, up, their product. 12 D: the inputs of q's LoRA, v's LoRA and the
  router in fp32. With gradient checkpointing: e * D for every layer, and one layer in full, the one being recomputed;
* logits of V entries: e bytes each and e for their gradient, and an fp32 copy with its log-softmax (every row counts as
  labelled).

Stage 2 of two-stage training saves less of this (no q/v LoRA trains); it is counted alike, a little too high.

Left out: attention matrices (``sdpa`` makes none), the vision tower and the scout, which run without gradient, the
allocator's slack and the framework's own memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from subtoken_train.backbones.attach import CompressedBackbone

FP32_BYTES = 4


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes by purpose.

    Attributes:
        rows: positions of one record before and after the reducer.
        parts: (what it is, bytes), in the order of a report.
    """

    rows: tuple[int, int]
    parts: tuple[tuple[str, int], ...]

    @property
    def total(self) -> int:
        """All of it."""
        return sum(size for _, size in self.parts)


def estimate_memory(
    parts: CompressedBackbone, batch_size: int, max_length: int, checkpointing: bool, compressed: int
) -> MemoryEstimate:
    """The estimate of the module's text; ``compressed`` tokens of a record are the image's (or the context's).

    Raises:
        ValueError: ``max_length`` holds no more than the image.
    """
    if max_length <= compressed:
        raise ValueError(f"max_length={max_length} leaves no room for text beside the {compressed} tokens of an image")
    # context is evicted from caches; its rows still run
    dropped = 0 if parts.reducer.stage == "context" else compressed - parts.reducer.kept_tokens(compressed)
    left = max_length - dropped
    shape, config = parts.family.shape, parts.family.decoder.config
    element = shape.element_bytes
    trained = sum(parameter.numel() for parameter in parts.parameters() if parameter.requires_grad)
    frozen = sum(p.numel() * p.element_size() for p in parts.parameters() if not p.requires_grad)
    hidden = config.hidden_size
    layer_row = element * (10 * hidden + 3 * shape.value_dim + 4 * config.intermediate_size) + 3 * FP32_BYTES * hidden
    input_row = element * hidden
    rows = [max_length if layer < parts.reducer.cut_layer else left for layer in range(shape.num_layers)]
    held = sum(rows) * input_row + max(rows) * layer_row if checkpointing else sum(rows) * layer_row
    logits = left * config.vocab_size * (2 * element + 2 * FP32_BYTES)
    return MemoryEstimate(
        (max_length, left),
        (
            ("frozen weights", frozen),
            ("LoRA + routers", trained * FP32_BYTES),
            ("gradients", trained * FP32_BYTES),
            ("AdamW state", 2 * trained * FP32_BYTES),
            ("activations", batch_size * held),
            ("logits", batch_size * logits),
        ),
    )
