"""The identity of an evaluation, equal answers, and the levels of rows."""

from __future__ import annotations

import json
import types
from decimal import Decimal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_job

from jaxrl_llm.commands.evaluate import evaluate_checkpoint
from jaxrl_llm.commands.export import export_checkpoint
from jaxrl_llm.config import loading as configs
from jaxrl_llm.evaluation import evaluate, held_out
from jaxrl_llm.evaluation.fingerprint import fingerprint
from jaxrl_llm.evaluation.levels import levels
from jaxrl_llm.types import Prompts, Rollout, Row


def rows(*extras: dict, source: str = 's') -> list[Row]:
  return [Row(str(i), 'q', (), 'a', source, extra) for i, extra in enumerate(extras)]


@pytest.mark.parametrize(
  'extra, level',
  [
    (dict(level='Level 3', length=2), 'Level 3'),
    (dict(difficulty=4), '4'),
    (dict(metadata=dict(difficulty='hard')), 'hard'),
    (dict(extra_info=dict(level=2.5)), '2.5'),
    (dict(metadata=dict(difficulty=dict(terms=(2, 6)))), ''),  # settings of all rows, not a level
    (dict(level=None), ''),
    ({}, ''),
  ],
)
def test_a_row_s_own_level(extra, level):
  assert levels(rows(extra)) == [level]


def test_shared_traits_are_levels_and_what_tells_rows_apart_is_none():
  extras = [dict(length=i % 3, metadata=dict(source_index=i, seed=1)) for i in range(12)]
  assert levels(rows(*extras)) == [f'length={i % 3}' for i in range(12)]
  both = [dict(a=i % 2, b=i % 4) for i in range(16)]
  assert levels(rows(*both))[3] == 'a=1 b=3'
  assert set(levels(rows(*extras[:9]))) == {''}  # three rows a value
  mixed = rows(*extras) + rows(*extras[:5], source='t')
  assert levels(mixed) == [f'length={i % 3}' for i in range(12)] + [''] * 5


def test_too_many_levels_are_none():
  assert set(levels(rows(*(dict(level=i) for i in range(32))))) != {''}
  assert set(levels(rows(*(dict(level=i) for i in range(33))))) == {''}


def test_equal_answers_get_equal_words():
  answers = evaluate._answers(
    ['= 1.0', 'so 1', '', '2'], lambda t: Decimal(t.split()[-1]) if t else None
  )
  assert answers == ['1.0', '1.0', None, '2']


def test_answers_and_how_far_they_are_trusted_stay_with_their_prompts():
  """Three prompts in calls of two: prompt i says 10·i greedily, then 10·i + 1, which is trusted by a hundredth."""

  class Table:
    rows = tuple(rows({}, {}, {}))
    tokens = tuple(np.zeros(1, np.int32) for _ in rows)

    def prompts(self, index, born):
      none = np.zeros((2, 1), np.int32)
      return Prompts(index[:, None], none[:, 0] + 1, index, none[:, 0] + born, none[:, 0])

  def sample(params, prompts, seed, begun):
    said_Bx1 = (10 * prompts.tokens_PxL + np.arange(2)).reshape(-1, 1)
    one_B = np.ones(4, np.int32)
    return Rollout(said_Bx1, said_Bx1, one_B, one_B, said_Bx1, one_B, said_Bx1)

  spec = types.SimpleNamespace(seed=0)
  ask = evaluate._Sampler(sample, spec, Table(), lambda ids: str(ids[0]), None, 2)
  progress = []
  said = evaluate._complete(
    ask,
    None,
    lambda prompts, rollout: rollout.tokens_BxT[:, 0] / 100,
    lambda done, prompts: progress.append((done, prompts)),
  )
  assert said.texts == said.full_texts == [['0', '1'], ['10', '11'], ['20', '21']]
  np.testing.assert_allclose(said.trust_PxN, [[0.01], [0.11], [0.21]])
  assert progress == [(2, 3), (3, 3)]
  assert evaluate._complete(ask, None, None).trust_PxN is None
  kinds = evaluate._by_kind(said, 1)
  assert kinds['greedy'].texts == [['0'], ['10'], ['20']] and kinds['greedy'].trust_PxN is None
  assert kinds['sampled'].texts == [['1'], ['11'], ['21']]
  assert kinds['sampled'].trust_PxN is said.trust_PxN


def test_votes_are_counted_where_the_grader_tells_what_it_compares():
  config, play = configs.default(), types.SimpleNamespace
  assert held_out.scoring(config.rewards, None, None).read_answer(' x ') == 'x'
  assert held_out.scoring(config.rewards, None, play(judge='rewards')).read_answer is not None
  assert held_out.scoring(config.rewards, None, play(judge='environment')).read_answer is None
  config.rewards.fn = 'package.module:function'
  assert held_out.scoring(config.rewards, None, None).read_answer is None
  config.rewards.fn = 'math_verify'
  read_answer = held_out.scoring(config.rewards, None, None).read_answer
  assert len({read_answer(t) for t in ('so $\\dfrac{1}{2}$', '\\boxed{ 0.5 }', '50\\%')}) == 1
  assert read_answer('\\boxed{x + 1}') == read_answer('$x+1$') != read_answer('$1+x$')
  assert read_answer('\\boxed{12_5}') != read_answer('\\boxed{12}') and read_answer('') is None
  config.rewards.right = 0.5
  assert held_out.scoring(config.rewards, None, None).right == 0.5


def test_what_an_evaluation_is_of_knows_graders_and_settings_and_no_workers():
  def identity(**changes):
    config = configs.default()
    for name, value in changes.items():
      config.update_from_flattened_dict({name.replace('__', '.'): value})
    return held_out.identity(config, config.rewards, types.SimpleNamespace(fingerprint='f'))

  first = identity()
  assert json.loads(json.dumps(first)) == json.loads(json.dumps(identity(rewards__workers=9)))
  assert (
    identity(rewards__fn='number')['grader']
    != first['grader']
    == identity(evaluation__samples=9)['grader']
  )
  assert identity(evaluation__samples=9)['settings'] != first['settings']
  assert identity(evaluation__sampling__temperature=0.5)['settings'] != first['settings']
  played = identity(environment__fn='walk')['grader']
  assert played['environment']['fn'] == 'walk' and 'environment' not in first['grader']


def test_other_weights_have_another_fingerprint_and_a_cut_changes_none():
  r = np.random.default_rng(0)
  tree = dict(a=r.normal(size=(8, 16)).astype(np.float32), b=r.normal(size=3).astype(jnp.bfloat16))
  mark = fingerprint(jax.tree.map(jnp.asarray, tree))
  assert len(mark) == 16 and mark == fingerprint(jax.tree.map(jnp.array, tree))
  mesh = jax.make_mesh((8,), ('x',))
  cut = jax.device_put(tree['a'], jax.sharding.NamedSharding(mesh, jax.P('x')))
  assert fingerprint(tree | dict(a=cut)) == mark
  others = [tree['a'][::-1], np.roll(tree['a'], 1, 1), tree['a'].reshape(16, 8), -tree['a']]
  bit = tree['a'].copy()
  bit.view(np.uint32)[3, 5] ^= 1
  marks = [fingerprint(tree | dict(a=jnp.asarray(x))) for x in (*others, bit)]
  assert len({mark, fingerprint(dict(c=tree['a'], b=tree['b'])), *marks}) == 7


def test_new_weights_under_an_old_path_are_evaluated_again(tmp_path):
  """A folder by the same name, with another model in it."""
  from safetensors.numpy import load_file, save_file

  on = dict(sft=None, evaluation=dict(every=0, prompts=8, samples=2))
  c = configs.load(tiny_job.config_file(tmp_path, **on))
  model = str(tmp_path / 'model')
  export_checkpoint(c, str(tmp_path / 'none'), model, 'float32', base=True)
  on |= dict(model=model, scratch=None)
  c = configs.load(tiny_job.config_file(tmp_path, **on))
  path = tmp_path / 'run/eval/step_000000.json'
  evaluate_checkpoint(c, str(tmp_path / 'run'))
  first = json.loads(path.read_text())
  file = f'{model}/model.safetensors'
  save_file({k: v * np.float32(1.5) for k, v in load_file(file).items()}, file, {'format': 'pt'})
  evaluate_checkpoint(c, str(tmp_path / 'run'))
  again = json.loads(path.read_text())
  assert first['weights'] != again['weights'] and first['model'] == again['model']
  assert [row['output'] for row in first['rows']] != [row['output'] for row in again['rows']]
