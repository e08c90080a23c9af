"""RLOO, by verl: its advantages and its loss without a ratio."""

from __future__ import annotations

from jaxrl_llm.objective import advantage
from tests.objective.official import lib, verl_core

OFFICIAL = lib.Official(*verl_core.PINNED)
SETTINGS = dict(
  advantage='leave_one_out', ratio='one', trust_region='none', aggregation='sequence_sum'
)
MUTANTS = {
  'mean of all': (
    advantage,
    '* n_Px1 / jnp.maximum(n_Px1 - 1, 1)\n\n\ndef raw',
    '* 1.0\n\n\ndef raw',
  ),
}


def official(torch, read, data):
  return verl_core.policy(torch, read, data, 'gpg', 'rloo', 'seq-mean-token-sum')


lib.main(__name__)
