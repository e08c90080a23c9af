"""DUET: its stop machine on stored rows, token by token: marker, streak of sure tokens, coin, abort, spared rows.

The official machine sees what the next token is to be drawn from, and ends a row by an end token in its place; here it
sees what the newest token was drawn from, as the project's rule does, which ends the row behind that token. Its marker
is looked for at each token, not every eighth.
"""

from __future__ import annotations

import collections
import math
import random
import types

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.rollout import early_exit, text_automaton
from tests.objective.official import lib

MACHINE = 'src/duet/duet_logits_processor.py'
OFFICIAL = lib.Official(
  'Haoyu-Hu/DUET', '82bd6f40c2a07f652d9bc242c7b956613ee26d72', (MACHINE,), 'Apache-2.0'
)
SETTINGS = dict(start=0.3, deadline=0.8, abort=0.95, margin=0.9, streak=5, ignore=0.05)
ROWS, TOKENS = 80, 40
TEXTS, TEXT = ['', 'a', 'b', 'ab', 'ca', 'c'], 'aba'
SEEDS = (0, 1)
WITHOUT = {'*': 'tokens, margins and lots of single rows'}
MUTANTS = {
  'no coin': (early_exit, 'row.uniform_S < ignore', 'row.uniform_S < 0'),
  'streak from nothing after the coin': (
    early_exit,
    'jnp.where(goes_on_S, streak - 1, run_S)',
    'jnp.where(goes_on_S, 0, run_S)',
  ),
  'spared rows exit': (early_exit, '(before_S < 0) | ', ''),
  'longer streak': (early_exit, 'sure_S = run_S >= streak', 'sure_S = run_S > streak'),
  'start': (early_exit, 'jnp.ceil(start * row.cap_S)', 'jnp.ceil(1.2 * start * row.cap_S)'),
  'margin': (early_exit, '(row.margin_S > margin)', '(row.margin_S > margin - 0.1)'),
  'weight of the spared': (early_exit, '1 / max(1 - abort, 1e-3)', '1 / max(abort, 1e-3)'),
  'deadline': (
    early_exit,
    'jnp.ceil(deadline * row.cap_S)',
    '1 + jnp.ceil(deadline * row.cap_S)',
  ),
}


def draw(seed):
  """Tokens that hold the marker early, late or never, in stretches of sure and unsure ones; lots that often hit."""
  r = np.random.default_rng(seed)
  tokens = r.choice([0, 5], (ROWS, TOKENS))
  for row in range(0, ROWS):
    if row % 4:
      place = r.integers(1, TOKENS - 4)
      tokens[row, place : place + 2] = [3, 1] if row % 2 else [1, 0]
      if not row % 2:
        tokens[row, place : place + 2] = [3, 4]  # 'abca', almost
        tokens[row, place + 2 : place + 4] = [1, 2]
        tokens[row, min(place + 4, TOKENS - 1)] = 1
  sure = np.repeat(r.random((ROWS, TOKENS // 4)) < 0.75, 4, axis=1)
  margin = np.where(sure, r.uniform(0.91, 0.99, sure.shape), r.uniform(0.1, 0.89, sure.shape))
  lots = r.random((ROWS, TOKENS))
  lots = np.where(r.random(lots.shape) < 0.3, 0.04 * lots, lots)
  return dict(tokens=tokens, margin=np.round(margin, 4), lots=np.round(lots, 4))


def official(torch, read, data):
  double = types.SimpleNamespace(**vars(torch) | dict(float32=torch.float64))
  text = read(MACHINE)
  signals = ('MAX_PROB', 'ENTROPY', 'MEAN_LOGPROB', 'MARGIN', 'TOP_K_MASS')
  names = {f'SIGNAL_{name}': name.lower() for name in signals}
  code = lib.functions(
    text, ('DuetStopProcessor',), torch=double, math=math, random=random, deque=collections.deque,
    SIGNAL_MODES=tuple(names.values()), **names,
  )  # fmt: skip
  detector = types.SimpleNamespace(
    should_check=lambda count: True,
    detect=lambda tokens: TEXT in ''.join(TEXTS[t] for t in tokens),
  )
  length, aborted, weight = [], [], []
  for tokens, margins, lots in zip(data['tokens'], data['margin'], data['lots'], strict=True):
    machine = code.DuetStopProcessor(
      99, 0.9, 'margin', eps_len=0.05, min_tokens=2, hysteresis_k=5, abort_eps=0.05, grace_window=4,
      marker_detector=detector, k1=int(0.3 * TOKENS), k2=int(0.8 * TOKENS) - 4,
    )  # fmt: skip
    count = 2
    while count <= TOKENS:
      machine._rng = types.SimpleNamespace(random=lambda: lots[count - 1])  # noqa: B023
      half = margins[count - 1] / 2
      logits = torch.full((100,), -math.inf)
      logits[:2] = torch.log(torch.tensor([0.5 + half, 0.5 - half]))
      machine([], list(tokens[:count]), logits)
      if machine._did_stop:
        break
      count += 1
    length.append(min(count, TOKENS))
    aborted.append(float(machine.did_abort))
    weight.append(1 / 0.05 if machine.eps_kept else 1.0)
  return dict(length=length, aborted=aborted, weight=weight)


def ours(data):
  rule_table = jnp.asarray(text_automaton.build_table(TEXTS, TEXT))
  length = np.full(ROWS, TOKENS)
  ended, aborted, weight = np.zeros(ROWS, bool), np.zeros(ROWS), np.ones(ROWS)
  memory = jnp.zeros((ROWS, early_exit.MEMORY_SIZE))
  for count in range(2, TOKENS + 1):
    row = early_exit.RowSignals(
      jnp.asarray(data['tokens']),
      jnp.full(ROWS, count),
      jnp.full(ROWS, TOKENS),
      jnp.zeros(ROWS),
      jnp.asarray(data['margin'][:, count - 1]),
      jnp.asarray(data['lots'][:, count - 1]),
      memory,
    )
    verdict = early_exit.marker(row, text=TEXT, table=rule_table)
    memory = verdict.memory_SxM
    weight = np.where(ended, weight, weight * verdict.weight_S)
    over = ~ended & np.asarray(verdict.exit_S | verdict.abort_S)
    aborted = np.where(over, verdict.abort_S, aborted)
    length = np.where(over, count, length)
    ended |= over
  return dict(length=length, aborted=aborted, weight=weight)


lib.main(__name__)
