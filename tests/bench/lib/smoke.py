"""`--smoke`: a benchmark at tiny sizes, to test within seconds that it runs. Its numbers are meaningless."""

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
  """Parse the command line; with `--smoke`, `sizes` replace the defaults.

  An option `out` is then in a temporary folder, so that smoke runs never mix with real ones.
  """
  parser.add_argument('--smoke', action='store_true', help='tiny sizes: only that it runs')
  known, _ = parser.parse_known_args()
  if known.smoke:
    parser.set_defaults(**sizes)
    if hasattr(known, 'out'):
      parser.set_defaults(out=os.path.join(folder(), os.path.basename(known.out or 'out')))
  return parser.parse_args()


def folder() -> str:
  """A temporary folder that is removed at exit."""
  path = tempfile.mkdtemp(prefix='smoke-')
  atexit.register(shutil.rmtree, path, ignore_errors=True)
  return path
