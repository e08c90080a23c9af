"""Greedy completions and samples of one call equal those of separate calls, whatever prompts they are encoded with."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxrl_llm.config import loading
from jaxrl_llm.distributed import sharding
from jaxrl_llm.evaluation import evaluate
from jaxrl_llm.learner import compile as programs
from jaxrl_llm.learner.spec_from_config import make_spec
from jaxrl_llm.learner.step_spec import evaluation_spec, trained_weights_spec
from jaxrl_llm.models import decoder
from jaxrl_llm.rollout.sampling import TokenFilter
from jaxrl_llm.types import ModelConfig, Prompts, Row

MODEL = ModelConfig(
  vocab=700, width=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp=48, max_tokens=64
)
COUNT, PREFIX, L, T, N = 7, 9, 16, 12, 3
SAMPLING = dict(temperature=0.8, top_k=40, top_p=1.0, min_p=0.0)


@pytest.fixture(scope='module')
def params():
  return jax.tree.map(lambda x: x * 1.7, decoder.init(MODEL, 0))


def make_spec_of():
  c = loading.default()
  c.dtype, c.prompts, c.rollouts, c.prompt_tokens, c.completion_tokens = 'float32', 2, 4, L, T
  return make_spec(c, MODEL, tuple(range(30)), sharding.make_mesh(c.mesh, jax.devices()[:1]))


class Table:
  """Prompts of different lengths with the same first tokens."""

  def __init__(self, prefix: int):
    r = np.random.default_rng(0)
    common = r.integers(0, 700, prefix)
    self.tokens = tuple(
      np.r_[common, r.integers(0, 700, n)].astype(np.int32) for n in (3, 1, 7, 2, 7, 5, 4)
    )
    self.rows = tuple(Row(str(i), 'q', (), 'a', 's', {}) for i in range(COUNT))

  def prompts(self, index, born=0):
    tokens_PxL, length_P = np.zeros((len(index), L), np.int32), np.zeros(len(index), np.int32)
    for p, i in enumerate(index):
      length_P[p] = len(self.tokens[i])
      tokens_PxL[p, : length_P[p]] = self.tokens[i]
    index_P, born_P = np.asarray(index, np.int32), np.full(len(index), born, np.int32)
    return Prompts(tokens_PxL, length_P, index_P, born_P, np.zeros(len(index), np.float32))


class Pool:
  def score(self, rows, texts):
    return type('Scores', (), dict(reward_B=np.array([len(text) for text in texts], float)))


def completions(spec, params, table) -> list[list[str]]:
  """The completions of every prompt in one call of a program of their own."""
  prompts = table.prompts(np.arange(COUNT), born=evaluate._NOISE_STEP)
  rollout = programs.compile_generate(spec)(params, prompts, np.int32(spec.seed), None)
  texts = [
    str(t[:n].tolist()) for t, n in zip(*map(np.asarray, (rollout[0], rollout[2])), strict=True)
  ]
  return [texts[i : i + len(texts) // COUNT] for i in range(0, len(texts), len(texts) // COUNT)]


@pytest.mark.parametrize('prefix', [0, PREFIX])
def test_one_call_gives_what_separate_calls_give(params, monkeypatch, prefix):
  """Prompts in batches of two, with their prefix encoded once, against all prompts without a prefix."""
  monkeypatch.setattr(evaluate, '_BATCH_ROLLOUTS', 2 * (1 + N))
  spec, table = make_spec_of(), Table(prefix)
  evaluator = evaluate.make_evaluator(spec, table, str, evaluate.Scoring(Pool()), N, SAMPLING)
  _, records, _ = evaluator(params)
  plain = trained_weights_spec(spec)
  token_filter = TokenFilter(*(SAMPLING[k] for k in TokenFilter._fields))
  decode = plain.rollout.decode._replace(rollouts=N, temperature=0.8, token_filter=token_filter)
  sampled = plain._replace(rollout=plain.rollout._replace(decode=decode))
  want = {
    'greedy': completions(evaluation_spec(spec, 0, 0.0), params, table),
    'sampled': completions(sampled, params, table),
  }
  got = {kind: [row['output'] for row in records if row['kind'] == kind] for kind in want}
  assert got == want
  lengths = {len(text) for texts in got['sampled'] for text in texts}
  assert len(lengths) > 3 and got['greedy'] != [texts[:1] for texts in got['sampled']]


def test_batches_are_of_nearly_equal_sizes(params, monkeypatch):
  """Seven prompts in batches of at most six: twice four, not six and one."""
  monkeypatch.setattr(evaluate, '_BATCH_ROLLOUTS', 3 * (1 + N))
  args = make_spec_of(), Table(PREFIX), str, None, N, SAMPLING
  assert evaluate._make_sampler(*args).batch_prompts == 3
  monkeypatch.setattr(evaluate, '_BATCH_ROLLOUTS', 6 * (1 + N))
  assert evaluate._make_sampler(*args).batch_prompts == 4
