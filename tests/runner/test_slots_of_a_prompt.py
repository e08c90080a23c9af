"""The groups that the curriculum expects are those that the objective sees: all of a prompt's slots."""

from __future__ import annotations

import types

import numpy as np
import pytest

from jaxrl_llm import curriculum
from jaxrl_llm.config import loading as configs
from jaxrl_llm.runner import host_step, setup
from jaxrl_llm.types import STOPPED, Batch, Prompts, Rollout, Row

G, SIZE, SLOTS, STEPS = 4, 400, 32, 60


class Table(list):
  """Stands for data.PromptTable."""

  file_tokens_N = None

  @property
  def rows(self):
    return self


def make_context(each: int, allocation: dict) -> types.SimpleNamespace:
  """The real curriculum and allocation; prompts share nothing, so that posteriors are exact."""
  config = configs.default()
  config.prompts, config.rollouts = SLOTS, G
  config.curriculum.slots_per_prompt, config.curriculum.allocation = each, allocation
  config.curriculum.prior_pooling = config.curriculum.evidence_decay = dict(fn='none')
  table = Table(Row(str(i), 'q', (), 'a', 's', {}) for i in range(SIZE))
  selection = types.SimpleNamespace(
    curriculum=setup.make_curriculum(config, table),
    lengths=curriculum.LengthEstimate(SIZE),
    allocate=setup._allocation(config),
    hints=None,
  )
  method = types.SimpleNamespace(needs_parts=False)
  return types.SimpleNamespace(
    config=config,
    selection=selection,
    replay=types.SimpleNamespace(unfinished=None, collector=None),
    tables=types.SimpleNamespace(train=table),
    spec=types.SimpleNamespace(objective=types.SimpleNamespace(method=method)),
  )


def answered(index_P, rate_N, random) -> Batch:
  """Binary rewards of each slot's rows."""
  B = len(index_P) * G
  right_B = (random.random(B) < np.repeat(rate_N[index_P], G)).astype(np.float32)
  zeros = np.zeros((B, 1), np.int32)
  rollout = Rollout(
    zeros, zeros, np.ones(B, np.int32), np.full(B, STOPPED, np.int8), zeros,
    np.ones(B, np.float32), np.zeros((B, 0), np.float32),
  )  # fmt: skip
  one_P = np.ones(len(index_P), np.int32)
  return Batch(Prompts(one_P[:, None], one_P, index_P, one_P, one_P), rollout, right_B, right_B)


@pytest.mark.parametrize(
  'each, allocation',
  [(1, dict(fn='equal')), (4, dict(fn='equal')), (4, dict(fn='marginal')), (4, dict(fn='neyman'))],
)
def test_predicted_and_observed_mixed_shares_agree(each, allocation):
  """Success rates are drawn from the prior Beta(1, 1), so that P(mixed) is exact whatever is chosen."""
  random = np.random.default_rng(each)
  rate_N = random.random(SIZE)
  context, chosen, landed, observed = make_context(each, allocation), [], [], []
  assert (
    context.selection.curriculum.group == G * each
  )  # of the utility, before slots are handed out
  for step in range(STEPS):
    choice = host_step.choose(context, step)
    assert len(choice.prompt_index) == SLOTS
    chosen += choice.record['mixed']
    batch = answered(choice.prompt_index, rate_N, random)
    row = host_step._observe(context, batch, np.ones(SLOTS, bool))
    landed.append(row['curriculum/predicted_mixed'])
    groups = [
      batch.reward_B.reshape(SLOTS, G)[choice.prompt_index == i] for i in set(choice.prompt_index)
    ]
    mixed = [0 < group.mean() < 1 for group in groups]
    assert row['curriculum/mixed_share'] == pytest.approx(np.mean(mixed))
    observed += mixed
  # choices.jsonl and metrics.jsonl say the same of the same groups.
  assert np.mean(chosen) == pytest.approx(np.mean(landed), abs=1e-4)
  chance = np.array(chosen)
  error = np.sqrt((chance * (1 - chance)).sum()) / len(chance)
  assert abs(np.mean(observed) - chance.mean()) < 4 * error, (
    np.mean(observed),
    chance.mean(),
    error,
  )
