"""`--smoke`: a benchmark at tiny sizes, which shows within seconds that it still runs. Its numbers mean nothing."""

from __future__ import annotations

import argparse
import atexit
import os
import shutil
import tempfile
from typing import Any

# Overrides of a configuration: a model and batches that a CPU core trains in a second.
TINY = (
  *(
    'scratch.width=32',
    'scratch.layers=2',
    'scratch.heads=2',
    'scratch.kv_heads=1',
    'scratch.mlp=64',
  ),
  *('prompts=4', 'rollouts=4', 'sft.steps=2', 'sft.prompts=8'),
  'evaluation.prompts=8',
)


def parse(parser: argparse.ArgumentParser, **sizes: Any) -> argparse.Namespace:
  """The command line's options; with `--smoke`, `sizes` take the place of the defaults.

  An option `out` then lies in a temporary folder, so that finished benchmarks and tiny ones never meet.
  """
  parser.add_argument('--smoke', action='store_true', help='tiny sizes: only that it runs')
  given, _ = parser.parse_known_args()
  if given.smoke:
    parser.set_defaults(**sizes)
    if hasattr(given, 'out'):
      parser.set_defaults(out=os.path.join(folder(), os.path.basename(given.out or 'out')))
  return parser.parse_args()


def folder() -> str:
  """A temporary folder that goes with the process."""
  path = tempfile.mkdtemp(prefix='smoke-')
  atexit.register(shutil.rmtree, path, ignore_errors=True)
  return path
