"""The arms of ``recall_screen.py``: which adapter, what is set otherwise at inference, and on what they are asked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from subtoken_train.types import Protocol

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = "lora_only-compactor-0.21875"
SCORERS = {"quest": "quest25_s8k6_anchor", "compactor": "compactor25_s16k12_anchor"}
SCORERS["expected_attention"] = "expected_attention25_s16k12_anchor"


@dataclass(frozen=True)
class Trial:
    """One arm: the recipe that trained its adapter, and what is set otherwise at inference (None: nothing)."""

    recipe: str
    reducer: str | None = None
    keep_ratio: float | None = None
    kept_groups: int | None = None
    key_channels: float = 1.0
    eviction: str | None = None
    eviction_keep: float = 1.0
    protocol: Protocol = "query_aware"

    @property
    def name(self) -> str:
        """Of its record."""
        said = [self.recipe.removeprefix("tinylm_")]
        said += [] if self.reducer is None else [f"under_{self.reducer}"]
        said += [] if self.keep_ratio is None else [f"r{self.keep_ratio:.6g}"]
        said += [] if self.kept_groups is None else [f"k{self.kept_groups}"]
        said += [] if self.key_channels == 1 else [f"keys{self.key_channels:.6g}"]
        said += [] if self.eviction is None else [self.eviction, f"{self.eviction_keep:.6g}"]
        return "-".join([*said, *(["context_first"] if self.protocol == "context_first" and not self.eviction else [])])


def trials() -> list[Trial]:
    """Evictions on an unreduced LoRA; each scorer's arms; keys cut beside groups at 21.875 %, on the same adapters."""
    evictions = ("compactor", "expected_attention")
    blind: dict[str, Any] = {"protocol": "context_first"}
    found = [Trial("tinylm_lora_only")]
    found += [
        Trial("tinylm_lora_only", eviction=method, eviction_keep=keep, **blind)
        for method in evictions
        for keep in (0.21875, 0.25)
    ]
    found += [Trial("tinylm_lora_only", method, keep) for method in evictions for keep in (0.21875, 0.25)]
    for scorer, anchor in SCORERS.items():
        found += [Trial(f"tinylm_{scorer}25{rest}") for rest in ("", "_s16k12", "_s16k12_valuenorm")]
        found += [Trial(f"tinylm_{anchor}")]
    adapter = "tinylm_compactor25_s16k12_valuenorm"
    for tokens, kept, channels in (
        (128, 16, 23), (128, 14, 26), (144, 12, 25), (160, 12, 20), (160, 10, 24), (176, 10, 20), (192, 10, 17),
        (192, 8, 21), (224, 8, 15), (144, 8, 32), (160, 6, 32),
    ):  # fmt: skip
        found.append(Trial(adapter, None, tokens / 512, kept, channels / 32, **blind))
    found += [Trial("tinylm_compactor25_s16k12_anchor", None, 144 / 512, None, 17 / 32, **blind)]
    for tokens, kept, channels in ((128, 12, 32), (160, 10, 24), (144, 12, 25), (144, None, 17), (128, None, 23)):
        found.append(Trial("tinylm_lora_only", "compactor", tokens / 512, kept, channels / 32, **blind))
    return found


@dataclass(frozen=True)
class Asked:
    """Which arms, with which training seeds, on which contexts; the folder of their records; what they are beside."""

    arms: list[Trial]
    split: str
    seed: int
    contexts: int
    trained_seeds: tuple[int, ...]
    out: Path
    references: dict[str, str]

    def files(self, trial: Trial) -> dict[int, Path]:
        """An arm's records by training seed."""
        only = len(self.trained_seeds) == 1
        return {seed: self.out / f"{trial.name}{'' if only else f'-seed{seed}'}.json" for seed in self.trained_seeds}


def finalists() -> list[Trial]:
    """Compactor as a peer, as token-only anchors, and under value groups and key channels, on one and the same LoRA."""
    blind: dict[str, Any] = {"protocol": "context_first"}
    return [
        Trial("tinylm_lora_only", eviction="compactor", eviction_keep=0.21875, **blind),
        *(
            Trial("tinylm_lora_only", "compactor", tokens / 512, kept, channels / 32, **blind)
            for tokens, kept, channels in (
                (112, None, 32), (144, None, 17), (128, 12, 32), (144, 12, 25), (160, 10, 24)
            )
        ),
    ]  # fmt: skip


TWINS = {
    REFERENCE: "Compactor, sets per head",
    "lora_only-under_compactor-r0.21875-context_first": "one set for all heads",
    "lora_only-under_compactor-r0.28125-keys0.53125-context_first": "one set, keys cut",
}
"""What the finalists are beside: the peer, and the token-only anchors with the same tricks."""
RESULTS = ROOT / "benchmarks/results"
SCREEN = Asked(trials(), "dev", 77, 200, (0,), RESULTS / "screens/recall", {REFERENCE: "Compactor at 21.875 %"})
FINAL = Asked(finalists(), "test", 3, 400, (0, 1, 2), RESULTS / "matched/recall", TWINS)
