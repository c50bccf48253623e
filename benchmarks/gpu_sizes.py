"""How much ``gpu_suite.py`` runs: on a GPU, and on a CPU to see whether it runs at all."""

from dataclasses import dataclass, replace

from transformers import LlamaConfig

from benchmarks.training_cases import CASES, Case


@dataclass(frozen=True)
class Sizes:
    """How much of everything."""

    answers: tuple[str, ...]  # models, and further options of their command
    decode: tuple[int, ...]  # entries of the decoding steps
    formats: tuple[int, ...]  # of those on rounded entries
    prompts: tuple[int, ...]  # tokens
    layers: int  # of the models of all three
    cases: dict[str, Case]  # of training; sizes of ``training_cases.py``
    rows: tuple[str, ...]  # of Table 8, by reducer and keep ratio
    protocol: tuple[str, ...]  # its model, and further options of its command
    pairs: int  # rounds
    training_pairs: int  # of training steps


FULL = Sizes(
    answers=("llava-hf/llava-1.5-7b-hf --new-tokens 256", "checkpoints/smollm2 --lengths 2048 8192 --new-tokens 256"),
    decode=(256, 1024, 4096, 8192, 32768, 131072), formats=(4096, 32768), prompts=(8192, 2048, 32768), layers=8,
    cases={name: CASES[name] for name in ("llava-7b", "llama-7b")},
    rows=("fastv 0.125", "visionzip 0.25", "visionzip 0.125", "fastv 0.25"),  # the last one has been timed
    protocol=("llava-hf/llava-1.5-7b-hf",), pairs=40, training_pairs=20,
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
    answers=("checkpoints/tiny-llava --new-tokens 2 --pairs 1",), decode=(64,), formats=(128,), prompts=(256,),
    layers=1, cases={"small": SMALL}, rows=("fastv 0.25",),
    protocol=("checkpoints/tiny-llava", "--new-tokens", "2", "--pairs", "1"), pairs=2, training_pairs=1,
)  # fmt: skip
