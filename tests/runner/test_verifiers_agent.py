"""Environments of the package verifiers are trained through the endpoint, by the rewards of their own rubrics.

Each case runs on a stand-in with the package's interface, and on the package where it is installed. Versions before 0.4
have classic environments, later ones tasksets; .ci/nightly installs both.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import sys

import jax
import numpy as np
import pytest

from jaxrl_llm import rewards
from jaxrl_llm.config import loading as configs
from jaxrl_llm.distributed import sharding
from jaxrl_llm.environments import verifiers_agent
from jaxrl_llm.learner import empty_records
from jaxrl_llm.learner import state as train_state
from jaxrl_llm.runner import endpoint, host_step, setup
from jaxrl_llm.types import UserError

for name in ('starlette', 'uvicorn', 'openai'):
  pytest.importorskip(name)

P, G, L, T = 4, 2, 64, 40
LIMIT_S = 900.0  # enough on a busy machine
QUESTIONS = ('12', 'raises', '345', 'reports')
CLASSIC = dict(id='even-env', args=dict(questions=QUESTIONS))
TASKSET = dict(taskset=dict(id='even-taskset'), player=dict(sampling=dict(max_tokens=5)))


def forget():
  """No module of verifiers, or built on it, stays imported."""
  for name in list(sys.modules):
    if name.partition('.')[0] in ('verifiers', 'even_env', 'even_taskset'):
      del sys.modules[name]
  verifiers_agent._load.cache_clear()


def generation():
  """'classic' or 'taskset', whichever the installed version of verifiers has; None without it."""
  try:
    version = importlib.metadata.version('verifiers')
  except importlib.metadata.PackageNotFoundError:
    return None
  return 'classic' if tuple(map(int, version.split('.')[:2])) < (0, 4) else 'taskset'


@pytest.fixture
def package(request, monkeypatch):
  """Puts a stand-in or the package onto the path, here and in workers, with the environments of this folder."""
  folders = [str(request.path.parent)]
  if request.param == 'stand-in':
    folders.insert(0, str(request.path.parent / 'verifiers_stand_in'))
  elif request.param != generation():
    pytest.skip(f'needs verifiers, with a {request.param} environment')
  forget()
  for folder in reversed(folders):
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv('PYTHONPATH', folder, prepend=os.pathsep)
  yield
  forget()


def made(path):
  c = configs.default()
  c.model, c.mode, c.steps = 'scratch', 'split', 2
  c.scratch.update(width=16, layers=1, heads=2, kv_heads=1, mlp=32, max_tokens=L + T)
  c.prompts, c.rollouts, c.prompt_tokens, c.completion_tokens = P, G, L, T
  c.data.update(dict(source='jsonl', path=str(path), size=0, answers=False, chat=False))
  c.evaluation.prompts, c.optimizer.learning_rate = 0, 1e-2
  c.rewards.failed.update(dict(stop_share=1.0))
  c.environment.update(dict(fn='endpoint', judge='environment', turns=8, workers=2))
  c.environment.update(dict(harness='jaxrl_llm.environments.verifiers_agent:play'))
  c.environment.update(dict(deadline_s=LIMIT_S, cpu_s=LIMIT_S, worker_memory_mb=0))
  return setup.build_context(c, sharding.make_mesh(c.mesh, jax.devices()[:1]))


def run(context, count):
  """`count` steps as train takes them → for each the weights, prompts, rollout, recorded episodes and landed batch."""
  call, recorded = endpoint.compile_call(context), []
  fill = context.episodes._rollout
  context.episodes._rollout = lambda spec, prompts, episodes, *rest: (
    recorded.append(episodes) or fill(spec, prompts, episodes, *rest)
  )
  state = train_state.init_state(context.spec, context.models.policy.params)
  batch = empty_records.empty_batch(context.spec)
  for index in range(count):
    inputs = host_step.build_inputs(context, index)
    state, rollout, device = call(state, batch, *inputs)
    prompts = context.episodes.prompts_of(inputs[0])
    landed = host_step.land(context, None, host_step.PendingStep(index, prompts, rollout, device))
    batch = landed.batch
    yield jax.device_get(state.params), prompts, rollout, recorded[-1], landed


def of_rubric(question, answers):
  """The reward of two answers by the classic environment's own rubric, in this process."""
  import verifiers as vf

  environment = vf.load_environment('even-env')
  (example,) = [x for x in environment.get_dataset() if x['answer'] == question]
  first, second = [dict(role='assistant', content=answer) for answer in answers]
  completion = [first, dict(role='user', content='again'), second]
  state = dict(example) | dict(completion=completion)
  asyncio.run(environment.rubric.score_rollout(state))
  return state['reward']


def by_hand(question, answers):
  text = ''.join(answers)
  return 2 * sum(ord(x) % 2 == 0 for x in text) / max(len(text), 1) + 0.25


CASES = [
  pytest.param('stand-in', CLASSIC, of_rubric, id='classic-stand-in'),
  pytest.param('classic', CLASSIC, of_rubric, id='classic-verifiers'),
  pytest.param('stand-in', TASKSET, by_hand, id='taskset-stand-in'),
  pytest.param('taskset', TASKSET, by_hand, id='taskset-verifiers'),
]


@pytest.mark.parametrize(('package', 'env', 'expected'), CASES, indirect=['package'])
def test_an_environment_is_trained_by_its_own_rewards(package, env, expected, tmp_path):
  """Two steps: rows hold the recorded ids, rewards are the rubric's, and a failing rollout is dropped alone."""
  if env is CLASSIC:
    pytest.importorskip('datasets')
  path = tmp_path / 'rows.jsonl'
  verifiers_agent.main([json.dumps(env), str(path)])
  written = [json.loads(line) for line in path.read_text().splitlines()]
  assert [row['question'] for row in written] == list(QUESTIONS)
  context = made(path)
  try:
    history = list(run(context, 2))
  finally:
    context.episodes.close()
  for _, prompts, rollout, episodes, landed in history:
    for b in range(P * G):
      row = context.tables.train.rows_of(prompts)[b // G]
      completions, failed = episodes[b].completions, row.question in ('raises', 'reports')
      assert rollout.turns.outcome_B[b] == (rewards.ERROR if failed else rewards.OK)
      assert len(completions) == (1 if failed else 2), context.episodes.message
      sampled = rollout.turns.number_BxT[b] >= 0
      assert max(len(completion.token_ids) for completion in completions) <= 5
      ids = [x for completion in completions for x in completion.token_ids]
      assert rollout.tokens_BxT[b][sampled].tolist() == ids
      if not failed:
        number_T = rollout.turns.number_BxT[b]
        answers = context.episodes.turn_texts(rollout.tokens_BxT[b], number_T)
        assert landed.batch.reward_B[b] == pytest.approx(expected(row.question, answers), rel=1e-6)
    assert landed.metrics['grade/errors'] == P * G // 2
  assert any(text in context.episodes.message for text in ('no such tool', 'the tool is gone'))
  rewards_B = history[0][-1].batch.reward_B
  assert np.ptp(rewards_B) > 0
  before, after = jax.tree.leaves(history[0][0]), jax.tree.leaves(history[1][0])
  assert any((x != y).any() for x, y in zip(before, after, strict=True))


@pytest.mark.parametrize('package', ['stand-in'], indirect=True)
def test_what_does_not_load_is_one_sentence(package, tmp_path):
  pytest.importorskip('datasets')
  path = str(tmp_path / 'rows.jsonl')
  for arguments, message in (
    (['{"id": "missing-env"}', path], "No module named 'missing_env'.*install its package and"),
    (['{"id": "even-env", "args": {"x": 1}}', path], "argument 'x'.*correct the settings"),
    (['{"id"', path], 'delimiter.*; usage: '),
    (['{}'], 'usage: python -m jaxrl_llm.environments.verifiers_agent'),
  ):
    with pytest.raises(SystemExit, match=message):
      verifiers_agent.main(arguments)
  assert len(verifiers_agent.rows(CLASSIC, 3)) == 3


def test_without_the_package_the_error_says_which_version(monkeypatch):
  forget()
  for name in ('verifiers', 'verifiers.v1'):
    monkeypatch.setitem(sys.modules, name, None)
  with pytest.raises(UserError, match='verifiers below 0.4: pip install'):
    verifiers_agent.rows(CLASSIC)
  with pytest.raises(UserError, match=r'verifiers 0\.4: pip install .*\[verifiers\]'):
    verifiers_agent.rows(TASKSET)
