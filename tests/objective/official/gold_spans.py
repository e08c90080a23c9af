"""Spans of GOLD: how it groups the tokens of two tokenizers, and the log-probs that it merges for each group.

The gradient is that of −Σ (log π_T − log π)·log π over these groups, whose factor in front is held fixed: GOLD's own
loss compares merged distributions by a sorted distance. Rows whose teacher ends inside of a token have a last group
whose texts differ; GOLD compares it, here it is left out. Probabilities are merged by the chain rule ('bayesian').
"""

from __future__ import annotations

import types

import numpy as np

from jaxrl_llm import objective
from jaxrl_llm.models import token_spans
from jaxrl_llm.objective import distillation, policy_gradient
from jaxrl_llm.objective import token_spans as sums
from jaxrl_llm.types import TeacherTokens
from tests.objective.official import lib

TRAINER = 'trl/experimental/gold/gold_trainer.py'
OFFICIAL = lib.Official(
  'huggingface/trl', 'f2cd57710ae345ea6428ae95363267fcf38a3dc8', (TRAINER,), 'Apache-2.0'
)
E, RAGGED = (
  9,
  (4, 13),
)  # the teacher's tokens at most; rows whose last token it does not read to its end
SETTINGS = dict(
  advantage=dict(fn='raw', baseline=0.0),
  ratio='one',
  trust_region='none',
  aggregation='token_mean',
  distillation=dict(fn='on_policy_spans', teacher_prompt_tokens=2, teacher_completion_tokens=E),
)
SEEDS = (0, 1)
WITHOUT = {'ratios far above and below 1 for both signs': 'the student is the policy that sampled'}
MUTANTS = {
  'sign': (
    distillation,
    'present(tokens.teacher_BxT) - tokens.old_BxT',
    'tokens.old_BxT - present(tokens.teacher_BxT)',
  ),
  'each token for itself': (
    policy_gradient,
    'token_spans.summed(advantage_BxT, span_BxT)',
    'advantage_BxT',
  ),
  'tokens outside of spans count': (
    policy_gradient,
    'batch.teacher_tokens.own_span_BxT >= 0',
    'batch.teacher_tokens.own_span_BxT >= -1',
  ),
  'spans begin one token late': (token_spans, "side='right'", "side='left'"),
  'the sum of the teacher at every token': (sums, 'span_BxT != before_BxT', 'span_BxT >= 0'),
}


def draw(seed):
  """Tokens of one to four bytes by the student, and other cuts of the same bytes by the teacher."""
  data, r = lib.draw(seed), np.random.default_rng(100 + seed)
  data['old'] = data['behavior'] = data['logp'].copy()
  mask_BxT = lib.mask(data).astype(int)
  data['bytes'] = r.integers(1, 5, mask_BxT.shape) * mask_BxT
  data['teacher_bytes'] = np.zeros((lib.B, E), int)
  for b, total in enumerate(data['bytes'].sum(1)):
    total -= b in RAGGED
    cuts = np.sort(r.permutation(np.arange(1, max(total, 1)))[: r.integers(0, E)])
    sizes = np.diff([0, *cuts, total]) if total else []
    data['teacher_bytes'][b, : len(sizes)] = sizes
  data['teacher'] = np.round(np.log(r.uniform(0.03, 0.9, (lib.B, E))), 4)
  return data


def offsets(sizes_N):
  """(first byte, end) of each token."""
  ends = np.cumsum(sizes_N)
  return [(int(end - size), int(end)) for end, size in zip(ends, sizes_N, strict=True)]


def official(torch, read, data):
  x = lib.tensors(torch, data)
  align = lib.method(read(TRAINER), 'ULDLoss', '_align_by_byte_offsets')
  merge = lib.method(
    read(TRAINER), 'ULDLoss', '_merge_probabilities_with_alignment_groups', torch=torch
  )
  own = types.SimpleNamespace(token_merge_strategy='bayesian')

  def merged(logp_N, groups):
    probs = torch.stack([logp_N.exp(), -torch.expm1(logp_N)], -1)
    return merge(own, probs, groups, [0] * len(logp_N))[:, 0].log()

  loss, count = 0.0, 0
  for b in range(len(x.logp)):
    sizes = [[int(n) for n in row[b] if n] for row in (x.bytes, x.teacher_bytes)]
    both = [offsets(n) for n in sizes]
    groups = align(*both)
    if sum(sizes[0]) != sum(sizes[1]):  # the last group is of different texts
      groups = [found[:-1] for found in groups]
    if not groups[0]:
      continue
    ours = merged(x.logp[b, : len(sizes[0])], groups[0])
    theirs = merged(x.teacher[b, : len(sizes[1])], groups[1])
    loss = loss - ((theirs - ours).detach() * ours).sum()
    count += sum(map(len, groups[0]))
  return lib.outputs(x, loss / count)


def ours(data):
  method = objective.method(lib.settings(SETTINGS))
  span_BxT, span_BxE = np.full((lib.B, lib.T), -1), np.full((lib.B, E), -1)
  for b, (sizes, taught) in enumerate(zip(data['bytes'], data['teacher_bytes'], strict=True)):
    sizes, taught = sizes[sizes > 0], taught[taught > 0]
    found = token_spans.align(sizes, taught, int(taught.sum()))
    span_BxT[b, : len(sizes)], span_BxE[b, : len(taught)] = found
  zeros_BxE, zeros_B = np.zeros((lib.B, E), int), np.zeros(lib.B, int)
  tokens = TeacherTokens(zeros_BxE, zeros_B, zeros_BxE, zeros_B, span_BxE, span_BxT)
  rows = lib.batch(data, method.needs_old)._replace(teacher_tokens=tokens)
  target = objective.targets(method, rows, lib.G)
  teacher_BxT = sums.at_first_tokens(data['teacher'], tokens)
  target = objective.distill(method, target.with_arrays(teacher_BxT=teacher_BxT), span_BxT)
  c_BxT, _ = objective.coefficients(method, target, data['logp'], data['entropy'])
  return dict(gradient=-np.asarray(c_BxT))


lib.main(__name__)
