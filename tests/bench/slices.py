"""Costs of a step of Qwen3 on TPU slices, from programs compiled ahead of time by libtpu; no TPU is needed.

python -m tests.bench.slices [--models 0.6b,8b,32b,30b-a3b] [--slices v5e-16,v5e-256] [--out FILE] [--smoke]
Each case is configs/dapo.py with 512 + 1536 tokens and 8 rollouts per prompt; only the shape of a model is read.
Update and generation are compiled separately. Cases in --out are not compiled again.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile

from jaxrl_llm.commands import compile_report, mesh_sweep
from jaxrl_llm.config import loading as configs
from tests.bench.curves import ROOT
from tests.bench.lib import smoke

# As the config.json of Qwen/Qwen3-*, which are public (read November 2026).
SHARED = dict(
  model_type='qwen3', vocab_size=151936, head_dim=128, num_key_value_heads=8, rms_norm_eps=1e-6, rope_theta=1e6,
  max_position_embeddings=40960, tie_word_embeddings=False,
)  # fmt: skip
SIZES = {
  '0.6b': dict(
    hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16, tie_word_embeddings=True,
  ),
  'tiny': dict(hidden_size=256, intermediate_size=512, num_hidden_layers=1, num_attention_heads=8),  # of --smoke
  '1.7b': dict(
    hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, num_attention_heads=16, tie_word_embeddings=True,
  ),
  '8b': dict(hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32),
  '32b': dict(hidden_size=5120, intermediate_size=25600, num_hidden_layers=64, num_attention_heads=64),
  '30b-a3b': dict(
    model_type='qwen3_moe', hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=48,
    num_attention_heads=32, num_key_value_heads=4, num_experts=128, num_experts_per_tok=8, norm_topk_prob=True,
  ),
}  # fmt: skip
SLICES = ('v5e-16', 'v5e-256', 'v5p-128', 'v6e-64')
# Axes besides fsdp, which takes the rest; tokens of a microbatch on a device.
_TENSOR = {'tiny': 1, '0.6b': 1, '1.7b': 1, '8b': 4, '32b': 8, '30b-a3b': 1}
_EXPERT = {'30b-a3b': 16}
_AT_ONCE = {'tiny': 2048, '0.6b': 8192, '1.7b': 8192, '8b': 4096, '32b': 4096, '30b-a3b': 4096}
PROMPT_TOKENS, COMPLETION_TOKENS, ROLLOUTS = 512, 1536, 8


def config(folder: str, model: str, mesh: dict[str, int], prompts: int):
  path = os.path.join(folder, model)
  os.makedirs(path, exist_ok=True)
  with open(os.path.join(path, 'config.json'), 'w') as file:
    json.dump(SHARED | SIZES[model], file)
  c = configs.load(f'{ROOT}/configs/dapo.py')
  c.model, c.prompts, c.rollouts = path, prompts, ROLLOUTS
  c.prompt_tokens, c.completion_tokens = PROMPT_TOKENS, COMPLETION_TOKENS
  c.mesh.update(mesh)
  return c


def measure(model: str, slice_: str, mesh: dict[str, int], rows: int, at_once: int) -> dict:
  """`rows` rollouts per chip; microbatches of `at_once` tokens on each device."""
  devices = compile_report.devices(slice_)
  with tempfile.TemporaryDirectory() as folder:
    c = config(folder, model, mesh, max(1, len(devices) * rows // ROLLOUTS))
    c.learner.microbatch_tokens = at_once
    result = mesh_sweep.measure(compile_report.make(c, devices))
  print(f'{model} on {slice_}: {mesh_sweep.line(result)}', flush=True)
  return result


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--models', default='0.6b,8b,32b,30b-a3b')
  parser.add_argument('--slices', default=','.join(SLICES))
  parser.add_argument('--mesh', default='', help='such as tensor=4; default: that of the table')
  parser.add_argument('--rows', type=int, default=8, help='rollouts for each chip')
  parser.add_argument(
    '--at-once',
    type=int,
    default=0,
    help='tokens of a microbatch on a device; 0: by the model',
  )
  parser.add_argument('--out', default='runs/slices.json')
  tiny = dict(models='tiny', slices='v5e-4', rows=8)
  arguments = smoke.parse(parser, **tiny)
  compile_report.prepare()
  found = json.load(open(arguments.out)) if os.path.exists(arguments.out) else {}
  for model in arguments.models.split(','):
    for slice_ in arguments.slices.split(','):
      mesh = dict(tensor=_TENSOR[model], expert=_EXPERT.get(model, 1))
      if arguments.mesh:
        mesh = {k: int(v) for k, v in (pair.split('=') for pair in arguments.mesh.split(','))}
      at_once = arguments.at_once or _AT_ONCE[model]
      name = f'{model} {slice_} {mesh} {arguments.rows} {at_once}'
      if name in found:
        continue
      found[name] = measure(model, slice_, mesh, arguments.rows, at_once)
      os.makedirs(os.path.dirname(os.path.abspath(arguments.out)), exist_ok=True)
      with open(arguments.out, 'w') as file:
        json.dump(found, file, indent=1)


if __name__ == '__main__':
  main()
