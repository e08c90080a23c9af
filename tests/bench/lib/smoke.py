"""Options of every benchmark: `--smoke`, tiny sizes whose numbers are meaningless, and `--write`."""

from __future__ import annotations

import argparse
import os
from typing import Any

from tests.bench.lib import results

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

  An option `out` is then in a temporary folder, so that smoke runs never mix with real ones. With `--write`, the output
  becomes a section of tests/bench/results/, unless the benchmark has an option of that name for a section of its own.
  """
  parser.add_argument('--smoke', action='store_true', help='tiny sizes: only that it runs')
  writes_itself = '--write' in parser._option_string_actions
  if not writes_itself:
    help = 'put the output into tests/bench/results/'
    parser.add_argument('--write', action='store_true', help=help)
  known, _ = parser.parse_known_args()
  if known.smoke:
    parser.set_defaults(**sizes)
    if hasattr(known, 'out'):
      parser.set_defaults(
        out=os.path.join(results.smoke_folder(), os.path.basename(known.out or 'out'))
      )
  options = parser.parse_args()
  if options.write and not writes_itself:
    results.write_output(options.smoke)
  return options
