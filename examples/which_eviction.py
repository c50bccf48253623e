"""How many facts of a text does each eviction still recall, at a quarter of the context?

python examples/which_eviction.py
"""

import re

from subtoken_train import SubTokenModel
from subtoken_train.resources import resource

backbone = resource("checkpoints/tiny-llama")
text = resource("data/samples/long.txt").read_text(encoding="utf-8")
context = text.rsplit("\n", 2)[0]
facts = dict(re.findall(r"Code (\w+) (\w+ \w+)\.", context))
questions = [f"\nCodes of {name}?" for name in facts]

for eviction in ("none", "streaming_llm", "snapkv", "keydiff", "compactor"):
    settings = {} if eviction == "none" else {"eviction": eviction, "eviction_keep": 0.25}
    model = SubTokenModel.from_pretrained(backbone, **settings)
    answers = model.ask(context, questions, max_new_tokens=8)
    right = sum(code in answer for code, answer in zip(facts.values(), answers, strict=True))
    print(f"{eviction:14} {right:2} of {len(facts)}  {model.cache_report().total_bytes:>9,} bytes")
