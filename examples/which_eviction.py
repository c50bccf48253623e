"""Which eviction still recalls a fact, at a quarter of the context?

python examples/which_eviction.py
"""

from subtoken_train import SubTokenModel
from subtoken_train.resources import resource

backbone = resource("checkpoints/tiny-llama")
text = resource("data/samples/long.txt").read_text(encoding="utf-8")
context = text.rsplit("\n", 2)[0]

for eviction in ("none", "streaming_llm", "snapkv", "keydiff", "compactor"):
    keep = {} if eviction == "none" else {"eviction": eviction, "eviction_keep": 0.25}
    model = SubTokenModel.from_pretrained(backbone, **keep)
    (answer,) = model.ask(context, ["\nCodes of polya?"], max_new_tokens=8)
    right = "quiet dragon" in answer
    print(f"{eviction:14} {'right' if right else 'wrong'}  {model.cache_report().total_bytes:>9,} bytes  {answer!r}")
