"""Compress a text once, then ask it twice from the small cache.

python examples/one_text_many_questions.py
"""

from subtoken_train import SubTokenModel
from subtoken_train.resources import resource

text = resource("data/samples/long.txt").read_text(encoding="utf-8")
context = text.rsplit("\n", 2)[0]
model = SubTokenModel.from_pretrained(resource("checkpoints/tiny-llama"), eviction="compactor", eviction_keep=0.5)

print(model.ask(context, ["\nCodes of polya, maros?"], max_new_tokens=16))
print(model.ask(None, ["\nCodes of hanan?"], max_new_tokens=16))  # the same context again
print(model.cache_report())
