"""How much ``gpu_suite.py`` runs: on a GPU, and on a CPU to see whether it runs at all."""

from dataclasses import dataclass, replace

from transformers import LlamaConfig

from benchmarks.training_cases import CASES, Case


@dataclass(frozen=True)
class Sizes:
    """How much of everything.

    Attributes:
        decode: entries of the decoding steps.
        share: entries at which the share of a copy is measured.
        prompts: tokens.
        layers: of the models of both.
        cases: of training; sizes of ``training_cases.py``.
        models: of Table 8.
        protocol: further options of its command.
        pairs: rounds.
        training_pairs: rounds of training steps.
    """

    decode: tuple[int, ...]
    share: tuple[int, ...]
    prompts: tuple[int, ...]
    layers: int
    cases: dict[str, Case]
    models: tuple[str, ...]
    protocol: tuple[str, ...]
    pairs: int
    training_pairs: int


FULL = Sizes(
    decode=(256, 1024, 4096, 8192, 32768, 131072), share=(32768, 131072), prompts=(2048, 8192, 32768), layers=8,
    cases={name: CASES[name] for name in ("llava-7b", "llama-7b")}, models=("llava-hf/llava-1.5-7b-hf",),
    protocol=("--random",), pairs=40, training_pairs=20,
)  # fmt: skip
SMALL = replace(
    CASES["llama-quest"], text="a Llama of the size of a test",
    config=lambda: LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=512,
    ),
    rank=2,
)  # fmt: skip
QUICK = Sizes(
    decode=(64,), share=(128,), prompts=(256,), layers=1, cases={"small": SMALL}, models=("checkpoints/tiny-llava",),
    protocol=("--new-tokens", "2", "--pairs", "1"), pairs=2, training_pairs=1,
)  # fmt: skip
