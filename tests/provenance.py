"""Where the formula of each method is from, for the tables of configs/README.md.

A method is proven where the gradient of its official code agrees with ours: tests/objective/official has a golden of
it, whose JSON names repository and commit. Every other method is named here, once.
"""

from __future__ import annotations

import json
import pathlib

GOLDENS = pathlib.Path(__file__).parent / 'objective' / 'official'
# Config → golden, where their names differ.
ALIASES = dict(rec='rec_ring')
# Goldens of a part of the method: the config leaves it out, or adds another part, which is not proven.
PARTIAL = ('areal_interpolated', 'duet', 'echo', 'greso', 'nudge_rl', 'ppo_ewma')
# Level → configs. Official code that was read was not run; a secondary source is another project's code, an index or
# notes by third parties; a reconstruction is ours, from an abstract or from memory.
LEVELS = {
  'official code, read': (
    *('april', 'areal_interpolated', 'dars', 'dars_top_ups', 'dots', 'echo', 'exopd', 'greso', 'latr'),
    *('nudge_rl', 'oprl', 'ppo_ewma', 'seeupo', 'swarm'),
  ),
  'paper': (
    *('alp', 'areal', 'decoupled_ppo', 'dynamic_sampling', 'knapsack', 'lora', 'ppo', 'qlora', 'topr'),
    *('ulo_rl', 'vade'),
  ),
  'secondary source': (
    *('ad_hint', 'aipo', 'arrol', 'bro_rl', 'dppo', 'forking', 'gdpo', 'grpo_lambda'),
    *('luspo', 'max_rl', 'mini_rl', 'oapl', 'pear', 'scale_rl', 'xrpo'),
  ),
  'reconstruction': (
    *('answer_odds', 'bepa', 'cross_tokenizer', 'dereason', 'duet', 'fimi_rm', 'guide', 'hidden_state'),
    *('minpro', 'openrs', 'otr', 'prefix_rl', 'remix', 'rorecomp', 'scope', 'seele', 'siri', 'sol_rl'),
    *('stepwiser', 'tree_opo'),
  ),
}  # fmt: skip


def golden(config: str) -> dict | None:
  """The golden of a config's method, or None."""
  path = GOLDENS / f'{ALIASES.get(config, config)}.json'
  complete = config not in PARTIAL and path.exists()
  return json.loads(path.read_text()) if complete else None


def proven(config: str) -> bool:
  """Whether official code was run and agrees."""
  return golden(config) is not None


def level(config: str) -> str:
  """'official code (owner/name@commit)', or the level that names the config; raises LookupError without one."""
  if found := golden(config):
    return f'official code ({found["repository"]}@{found["commit"][:7]})'
  levels = [name for name, configs in LEVELS.items() if config in configs]
  if len(levels) != 1:
    raise LookupError(
      f'the method of config {config} is in {levels or "no level"} of LEVELS in tests/provenance.py; name it once, '
      'or add a golden of official code.'
    )
  return levels[0]
