"""The half of ``compression_step.py`` that runs kvpress's presses, in an environment of its own.

It imports kvpress 0.5.4 and transformers 5.2, and nothing of this package. It is started by that program, reads the
layer from FOLDER and answers a line of JSON with a line of JSON: ``{"case": ..., "save": bool}`` with the processor's
seconds of one compression step.
"""

from __future__ import annotations

import json
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import kvpress
import torch
from transformers import LlamaConfig, LlamaModel

PRESSES = {
    "expected_attention": kvpress.ExpectedAttentionPress,
    "compactor": kvpress.CompactorPress,
    "keydiff": kvpress.KeyDiffPress,
    "tova": kvpress.TOVAPress,
    "lagkv": kvpress.LagKVPress,
    "snapkv": kvpress.SnapKVPress,
    "knorm": kvpress.KnormPress,
    "h2o": kvpress.ObservedAttentionPress,
}


class Layer:
    """One attention layer with recorded weights, and what its forward pass left."""

    def __init__(self, folder: Path) -> None:
        given = torch.load(folder / "layer.pt")
        config = LlamaConfig(**given["config"])
        model = LlamaModel(config).eval()
        self.module = model.layers[0].self_attn
        self.module.rotary_emb = model.rotary_emb
        self.module.load_state_dict(given["weights"])
        self.hidden, self.key, self.value = given["hidden"], given["key"], given["value"]
        self.folder, self.ratio = folder, 1 - given["kept"]
        positions = torch.arange(self.hidden.shape[1])[None]
        self.rotation = model.rotary_emb(self.hidden, positions)

    def step(self, case: str, entries: int) -> tuple[float, Any]:
        """Seconds of scores, choice and the shortened keys and values; the values."""
        press = PRESSES[case](compression_ratio=self.ratio)
        hidden, key, value = self.hidden[:, :entries], self.key[:, :, :entries], self.value[:, :, :entries]
        cos, sin = (each[:, :entries] for each in self.rotation)
        attentions = None
        start = time.process_time()
        if case == "h2o":  # what eager attention, which the press needs, makes and other attention does not
            attentions = self._attention(hidden, key, cos, sin)
        _, values = press.compress(self.module, hidden, key, value, attentions, {"position_embeddings": (cos, sin)})
        return time.process_time() - start, values

    def _attention(self, hidden: Any, key: Any, cos: Any, sin: Any) -> torch.Tensor:
        query = self.query[:, :, : hidden.shape[1]]
        keys = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
        logits = query @ keys.transpose(-1, -2) * self.module.scaling
        length = logits.shape[-1]
        return (logits + torch.full((length, length), -torch.inf).triu(1)).softmax(-1)

    @property
    def query(self) -> torch.Tensor:
        """Rotated queries, made once."""
        if not hasattr(self, "_query"):
            self._query = torch.load(self.folder / "layer.pt")["query"]
        return self._query


@torch.no_grad()
def serve(folder: Path) -> None:
    """Answer until the input ends."""
    torch.set_num_threads(1)
    layer = Layer(folder)
    print(json.dumps({each: version(each) for each in ("kvpress", "transformers", "torch")}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        seconds, values = layer.step(asked["case"], asked["entries"])
        if asked["save"]:
            torch.save(values, folder / "theirs.pt")
        print(json.dumps(seconds), flush=True)


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
