"""Writes source_metrics_golden.json: the metrics by source of V-Triune's own code, on random completions.

python tests/runner/source_metrics_official.py <verl/trainer/ppo/metric_utils.py of the repository>     (needs torch)
"""

from __future__ import annotations

import json
import pathlib
import sys
import types

import numpy as np

GOLDEN = pathlib.Path(__file__).with_name('source_metrics_golden.json')
REPOSITORY = 'MiniMax-AI/One-RL-to-See-Them-All'
COMMIT = '39bcf0d0537d7aa211d2f6ce73c8e51c396c1adb'
TEXTS = ('It is 4.', 'Wait, it is 5.', 'I am awaiting 6.', 'Let me RE-CHECK: 7.', 'Reset to 8.')
B, T = 24, 6


def inputs() -> dict:
  """Completions of three sources; every length and text occurs right and wrong."""
  random = np.random.default_rng(0)
  return dict(
    source=random.choice(['math', 'chart', 'count'], B, p=[0.5, 0.4, 0.1]).tolist(),
    text=random.choice(TEXTS, B).tolist(),
    length=random.integers(1, T + 1, B).tolist(),
    right=random.integers(0, 2, B).tolist(),
    format=random.integers(0, 2, B).tolist(),
  )


def official(path: str, data: dict) -> dict[str, float]:
  """The official metrics whose names have a source."""
  import torch

  sys.modules['wandb'] = types.SimpleNamespace(Table=lambda columns: None)  # type: ignore
  sys.modules['verl'] = types.SimpleNamespace(DataProto=object)  # type: ignore
  space: dict = {}
  exec(compile(pathlib.Path(path).read_text(), '<official>', 'exec'), space)
  space['wandb'] = types.SimpleNamespace(
    Table=lambda columns: types.SimpleNamespace(add_data=lambda *row: None)
  )
  length_B = torch.tensor(data['length'])
  mask_BxT = (torch.arange(T) < length_B[:, None]).float()
  zeros_BxT = torch.zeros(B, T)
  names = ('token_level_scores', 'token_level_rewards', 'advantages', 'returns', 'responses')
  tensors = dict.fromkeys(names, zeros_BxT) | dict(
    attention_mask=torch.cat([torch.ones(B, 2), mask_BxT], dim=1)
  )
  keys = ('source', 'text', 'right', 'format')
  rows = [
    dict(
      data_source=source, prompt='', response=text, id=i,
      accuracy_reward=float(right), format_reward=float(form),
    )
    for i, (source, text, right, form) in enumerate(zip(*(data[k] for k in keys), strict=True))
  ]  # fmt: skip
  found = space['compute_data_metrics'](types.SimpleNamespace(batch=tensors), rows, 0, False)
  sources = set(data['source'])
  return {
    name: float(value)
    for name, value in found.items()
    if isinstance(value, float) and value == value and any(s in name for s in sources)
  }


if __name__ == '__main__':
  data = inputs()
  golden = dict(repository=REPOSITORY, commit=COMMIT, inputs=data)
  GOLDEN.write_text(json.dumps(golden | dict(outputs=official(sys.argv[1], data)), indent=1) + '\n')
