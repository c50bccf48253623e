"""What evictions in bounded memory cost a text's own continuation: loss, bytes and time of a step, arms step by step.

    python benchmarks/long_answers.py WIKITEXT/test.txt triattention.json      # SmolLM2, 45 minutes of one core

Every arm reads the same 256 tokens of each stretch and is given the next 3,840 one by one; each step is made by all arms
in turns. ``triattention.json`` is what ``subtoken-train calibrate triattention`` writes.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.pairs import hardware
from subtoken_train import SubTokenModel

TEXTS, PROMPT, STEPS, ENTRIES, MORE = 6, 256, 3840, 512, 1690
"""``MORE`` entries in four bits are as many bytes as ``ENTRIES`` in bfloat16."""
TRI = {"eviction": "triattention", "eviction_options": {"calibration": sys.argv[2]}}
ARMS = {
    "full cache": {},
    "StreamingLLM": {"eviction": "streaming_llm", "eviction_keep": f"{ENTRIES}tokens"},
    "R-KV": {"eviction": "rkv", "eviction_keep": f"{ENTRIES}tokens"},
    "TriAttention": {**TRI, "eviction_keep": f"{ENTRIES}tokens"},
    "TriAttention, 4 bits": {**TRI, "eviction_keep": f"{MORE}tokens", "kv_dtype": "int4_rotated"},
    "R-KV, 4 bits": {"eviction": "rkv", "eviction_keep": f"{MORE}tokens", "kv_dtype": "int4_rotated"},
}


def main() -> None:
    torch.set_num_threads(1)
    online = {"eviction_every": 128, "scope": "all"}
    models = {
        name: SubTokenModel.from_pretrained("checkpoints/smollm2", dtype="bfloat16", **arm, **(online if arm else {}))
        for name, arm in ARMS.items()
    }
    ids = models["full cache"].tokenizer(Path(sys.argv[1]).read_text())["input_ids"]
    apart, length = (len(ids) - PROMPT - STEPS - 1) // (TEXTS - 1), PROMPT + STEPS + 1
    rows = torch.tensor([ids[i * apart : i * apart + length] for i in range(TEXTS)])
    caches = {name: model(rows[:, :PROMPT]).past_key_values for name, model in models.items()}
    nats, seconds, names = {name: [] for name in ARMS}, {name: [] for name in ARMS}, list(ARMS)
    for place in range(PROMPT, PROMPT + STEPS):
        for name in names[place % len(names) :] + names[: place % len(names)]:
            start = time.perf_counter()
            out = models[name](rows[:, place, None], past_key_values=caches[name])
            seconds[name].append(time.perf_counter() - start)
            said = out.logits[:, -1].float().log_softmax(-1).gather(1, rows[:, place + 1, None])
            nats[name].append((-said[:, 0]).tolist())
    half, arms = STEPS // 2, {}
    for name in ARMS:
        late, report = np.array(seconds[name][half:]), models[name].cache_report()
        arms[name] = {
            "nats": np.array(nats[name]).mean(0).round(4).tolist(),
            "last_half": np.array(nats[name][half:]).mean(0).round(4).tolist(),
            "last_bytes": report.total_bytes,
            "median_step_ms": round(1e3 * float(np.median(late)), 1),
            "mean_step_ms": round(1e3 * float(late.mean()), 1),
        }
    print(json.dumps({"hardware": hardware("cpu"), "arms": arms}, indent=1))


if __name__ == "__main__":
    main()
