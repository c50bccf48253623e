"""The bands of the paper's recipes, as text: what ``generate.py`` puts together."""

from __future__ import annotations

HEADER = """\
# {summary}
#
{data}#   check   subtoken-train check --config recipes/{name}.yaml --offline
{first}#   train   subtoken-train fit --config recipes/{name}.yaml
#   8 GPUs  subtoken-train fit --config recipes/{name}.yaml --trainer.devices 8
#             --trainer.strategy ddp --trainer.accumulate_grad_batches {shared}
#   try     subtoken-train fit --config recipes/{name}.yaml --trainer.max_steps 20
#             --output_dir runs/try
#
# Source: {source}.
# "silent" marks what the paper does not say, and the reading taken.
# Written by recipes/generate.py.
seed_everything: 0                      # silent
"""

VISION_FETCH = """\
#   data    data/README.md says where llava_v1_5_mix665k.json and its images come from and how they are laid out:
#             hf download liuhaotian/LLaVA-Instruct-150K llava_v1_5_mix665k.json --repo-type dataset
#               --local-dir data/llava
#             images below data/llava/images
"""

LANGUAGE_FETCH = """\
#   data    fetched from the Hub at the first run and cached (data.train below; a local file works too)
"""

MODEL = """
### output
output_dir: runs/{name}

model:
  ### model
  backbone:
    path: {path}
{dtype}{pixels}
  ### method
{lora}"""

DTYPE = """\
    dtype: bfloat16                     # of the frozen weights; routers and LoRA stay fp32
    attention: sdpa
"""

EMBEDDED_DTYPE = """\
    dtype: float32
"""

EMBEDDED_HEADER = """# {summary}
#
#   train   subtoken-train fit --config recipes/{name}.yaml
#
# Written by recipes/generate.py.
seed_everything: 0
"""

EMBEDDED_LORA = """\
  lora: {rank: 8, alpha: 16, dropout: 0.0}
"""

EMBEDDED_TRAIN = """
  ### train
  optimizer:
    learning_rate: 3.0e-3
    weight_decay: 0.0
    warmup_steps: 15                    # optimiser steps
    schedule: cosine
    final_fraction: 0.01                # of the peak rate, at the last step
"""

EMBEDDED_DATA = """
### dataset
data:                                   # facts stated in English text, asked in the query region; drawn as needed
  context_length: 512                   # tokens
  num_facts: 24
  num_questions: 8
  batch_size: 8
  seed: 0

trainer:
  accelerator: cpu
  max_steps: 150
  gradient_clip_val: 1.0
  log_every_n_steps: 20
"""

QWEN_PIXELS = """\
    max_pixels: 112896                  # silent; 144 visual tokens at most, those of the image that Table 8 times
    # Table 7 pads the images of every backbone. Read so: Qwen2.5-VL's own preprocessing, which keeps the aspect ratio;
    # to the letter, a padded square as LLaVA-1.5's: --model.backbone.image_aspect_ratio pad
"""

INTERNVL_PIXELS = """\
    max_pixels: 1204224                 # six tiles of 448 x 448, as InternVL's own fine-tuning; published: twelve
"""

VISION_LORA = """\
  lora:                                 # on q and v of every language-model layer
    rank: 16
    alpha: 32                           # the paper's "scaling": lora_alpha, so the update is multiplied by 32 / 16
    dropout: 0.05
"""

LANGUAGE_LORA = """\
  lora:                                 # on q and v of every layer
    rank: 32
    alpha: 16                           # the paper's "scaling": lora_alpha, so the update is multiplied by 16 / 32
    dropout: 0.05
"""

ROUTING = """\
  routing:
    selector: {selector:<26}# {router}
    num_groups: {S:<24}# S
    kept_groups: {K:<23}# K, groups kept per retained token
    balance_weight: 0.01                # lambda of the load-balance loss
"""

ROUTER_WORDS = {
    "linear": "a linear map in every layer (appendix B.1)",
    "mlp": "two layers (section 4.4); silent on their width, D/4, and activation, GELU",
    "value_norm": "no router: the groups of largest norm",
    "bilinear": "(A h) * (C s_Q) beside W h, in every layer",
}

ROUTER_READINGS = """\
    # Silent, and read so: a router sees what v_proj reads (the layer's input after its norm) and has a bias; weights
    # start at N(0, 0.02), biases at 0; the straight-through gradient is that of a sigmoid; the load-balance loss is
    # S * sum_g f_g * P_g of each sample and layer (f: share of selections, P: mean softmax), then their mean.
"""

BEST_RANKING = """\
    ranking: frozen                     # by the base weights: which tokens stay does not drift while LoRA is trained
"""

BEST_ROUTING = """\
  routing:                              # what docs/choosing.md measured as best, on the embedded model; not the paper's
    selector: bilinear                  # (A h) * (C s_Q) beside W h: the order of tokens follows the question
    query_rank: 16                      # rows of A and C
    features: [attention]               # the question's attention to a token joins the logits
    score_prior: value_norm             # training starts from selection by value norm
    value_gate: true                    # kept groups are scaled by 2 sigmoid(beta logit), beta learned per layer
    num_groups: {S:<24}# S
    kept_groups: {K:<23}# K, groups kept per retained token
    balance_weight: 0.0                 # no load-balance loss
"""

ANCHOR = """\
    round_up: true                      # the anchor never has fewer bytes than {arm}
    matches: {matches:<27}# the keep_ratio of that arm: less than a token more at every length
"""

FILL = """\
    fill: {fill:<30}# what a dropped group reads as
"""

LANGUAGE_BUDGET = """\
    budget: global                      # the best N x K (token, group) pairs of a sample (section 3.4)
"""

LANGUAGE_QUERY = """\
    query_conditioned: true             # the mean state of the query tokens joins the router's input (section 3.4)
"""

VISION_QUERY = """\
    query_conditioned: true             # section 3.5; silent on the summary: the mean state of the question's tokens
"""

METHOD_NOTES = {
    "fastv": """\
    stage: embeds                       # the shortened input starts again at layer 0: the paper's lengths
    layer: 2                            # L_f as FastV publishes it: ranking by layer 1's attention; the paper is silent
""",
    "pyramiddrop": """\
    stages: 4                           # of 8 layers; the paper's half per stage is an average of 46.875 %
""",
    "fitprune": """\
    calibration: null                   # the tables that the release prints for this very model
""",
    "sparsevlm": """\
    version: 1                          # recycles; 2 keeps positions and corrects what it ranks by
""",
    "quest_embedded": """\
    page_size: 4
    window: 16                          # the last context tokens that always stay, half of the budget at most
""",
    "quest": """\
    page_size: 16                       # Table 5: chunk
    window: 64                          # Table 5; read as the last context tokens that always stay, inside the budget
                                        # and half of it at most
""",
}

VISION_TRAIN = """
  ### train
  gradient_checkpointing: true          # silent; decoder layers are recomputed in the backward pass, to save memory
  optimizer:                            # AdamW
    learning_rate: 2.0e-4               # LoRA and routers alike; silent on a rate of the routers' own
    weight_decay: 0.0
    warmup_steps: 1000                  # optimiser steps
    schedule: cosine                    # silent for VLMs; cosine after warm-up as in Table 5 (LLMs)
    final_fraction: 0.0                 # of the peak rate, at the last step; silent
"""

VISION_DATA = """
### dataset
data:
  train_file: data/llava/llava_v1_5_mix665k.json   # LLaVA-v1.5 instruction tuning, 665K records
  image_folder: data/llava/images       # {image_words}
  max_length: {max_length}                      # tokens, visual ones included
  batch_size: {batch}                         # records per device and forward pass
  num_workers: 8                        # processes that decode images and tokenise
  seed: 0                               # of the shuffling; silent

trainer:
  accelerator: gpu
  devices: 1                            # silent for training (the paper measures on one H100 NVL)
  precision: bf16-mixed                 # silent; bf16-true would round LoRA and routers to bf16 as well
{batch_words}  accumulate_grad_batches: {accumulate}
  max_steps: 10000                      # optimiser steps
  gradient_clip_val: 1.0                # silent; global norm, the default of LLaVA-1.5's trainer
  log_every_n_steps: 10
"""

BATCH_WORDS = (
    "  # Silent on the batch. {batch} x {accumulate} x 1 device = 64 records per step: 10,000 steps are then "
    "640,000 records, one pass over\n  # the 665K, as LLaVA-1.5 trains. LLaVA-1.5's own batch, 128, is "
    "--trainer.accumulate_grad_batches {twice} (two passes).\n"
)

LANGUAGE_TRAIN = """
  ### train
  gradient_checkpointing: true          # silent; decoder layers are recomputed in the backward pass, to save memory
  optimizer:                            # AdamW
    learning_rate: 3.0e-5               # LoRA and routers alike; silent on a rate of the routers' own
    weight_decay: 0.01
    warmup_steps: 4000                  # optimiser steps
    schedule: cosine                    # after warm-up
    final_fraction: 0.0                 # of the peak rate, at the last step; silent
"""

LANGUAGE_DATA = """
### dataset
data:
  train:                                # WikiText-103
    name: Salesforce/wikitext
    config: wikitext-103-raw-v1
    documents: wikitext                 # rows are lines; an article starts at its title
  block_length: 2048                    # tokens: 1,024 of context, then 1,024 of query region
  context_length: 1024
  prefix_tokens: 64                     # the first query tokens choose and summarise, without loss: no look-ahead.
                                        # The paper reads the whole region; 0 does that, never for perplexity
  batch_size: 1                         # blocks per device and forward pass; silent
  num_workers: 2                        # processes that make batches
  seed: 0                               # of the shuffling; silent

trainer:
  accelerator: gpu
  devices: 1                            # silent for training
  precision: bf16-mixed                 # silent; bf16-true would round LoRA and routers to bf16 as well
  accumulate_grad_batches: 8            # silent: 8 blocks of 2,048 tokens per step
  max_steps: 25000                      # optimiser steps
  gradient_clip_val: 1.0                # silent
  log_every_n_steps: 10
"""

IMAGE_WORDS = {
    "square": "images are padded to a square (aspect-ratio padding), then 336 x 336",
    "capped": "images keep their aspect ratio under max_pixels (a reading, see there)",
    "448": "images of any size, in up to six 448 x 448 tiles and their whole",
    "nine_tiles": "images of any size, in 384 x 384 tiles and their whole; crops of up to nine tiles",
    "own": "images keep their aspect ratio, up to 1,280 visual tokens each",
    "tiles": "images of any size, in up to four 336 x 336 tiles and their whole",
}

STAGE2 = """\
  stage2:                               # section 4.4: stage 1 stays frozen. Silent on its keep ratio; read: the same r
    adapter: runs/{first}/adapter
    # Also taken, and named in the adapter's card: runs/{model}_lora_only/adapter (LoRA without a token reducer), and
    # runs/{anchor}/adapter (the matched anchor itself)
"""

OUTPUT_LORA = """\
    output_lora:                        # "oLoRA": a small LoRA on o_proj, trained beside the router; no KV bytes
      rank: 8                           # silent
      alpha: 16                         # silent
      dropout: 0.05                     # silent
"""
