"""The oracle of real runs takes the best prompts of its scans."""

from __future__ import annotations

import json
import types

import numpy as np
import pytest
import tiny_job

from jaxrl_llm import train
from jaxrl_llm.config import loading
from jaxrl_llm.curriculum import Curriculum
from jaxrl_llm.runner import prompt_encoding
from tests.bench.lib import oracle

INDEX_M, RATE_M = np.array([7, 3, 5, 9, 1]), np.array([1.0, 0.5, 0.125, 0.375, 0.0])


@pytest.mark.parametrize(
  ('busy', 'expected'), [((), [3, 9, 5]), ((3,), [9, 5, 7]), ((5, 9), [3, 7, 1])]
)
def test_it_takes_the_rates_nearest_to_one_half_that_are_not_busy(busy, expected):
  curriculum = Curriculum(loading.default().curriculum.to_dict(), 12, group=8)
  choose = oracle.Oracle(curriculum, types.SimpleNamespace(index_M=INDEX_M, rate_M=RATE_M, seed=0))
  proposal = choose(4, 3, busy=busy)
  assert proposal.index.tolist() == expected
  rate = dict(zip(INDEX_M.tolist(), RATE_M.tolist(), strict=True))
  assert proposal.worth.tolist() == [4 * rate[i] * (1 - rate[i]) for i in expected]


def test_a_run_follows_its_scans(tmp_path, monkeypatch):
  config = loading.load(tiny_job.config_file(tmp_path, steps=4, rollouts=8, sft=dict(steps=60)))
  scans, measure = [], oracle.Scan.__call__

  def recorded(scan, step, state, index_P):
    measure(scan, step, state, index_P)
    scans.append((scan.index_M, scan.rate_M))

  monkeypatch.setattr(oracle.Scan, '__call__', recorded)
  original = prompt_encoding.compile_call
  with oracle.chosen_by_oracle(config.rewards, 6):
    train.run(config, str(tmp_path / 'run'))
  assert prompt_encoding.compile_call is original
  lines = (tmp_path / 'run/choices.jsonl').read_text().splitlines()
  chosen = [json.loads(line)['prompt'] for line in lines]
  assert len(scans) == len(chosen) == 4
  for step, (index_M, rate_M) in enumerate(scans[:-1], 1):
    assert len(index_M) == len(np.unique(index_M)) == 4 * 6
    assert 0 < rate_M.mean() < 1 and np.all(rate_M * 8 % 1 == 0)
    best_P = np.argsort(-(rate_M * (1 - rate_M)), kind='stable')[:4]
    assert chosen[step] == index_M[best_P].tolist()
