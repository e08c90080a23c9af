"""An agent written against OpenAI's client is trained: its rows hold the ids that were sampled, and mask the rest."""

from __future__ import annotations

import ast
import inspect
import json
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from jaxrl_llm import rewards
from jaxrl_llm.config import loading as configs
from jaxrl_llm.distributed import sharding
from jaxrl_llm.learner import empty_records
from jaxrl_llm.learner import state as train_state
from jaxrl_llm.models import decoder
from jaxrl_llm.runner import endpoint, host_step, setup
from jaxrl_llm.types import UserError

pytest.importorskip('starlette')
pytest.importorskip('uvicorn')
pytest.importorskip('openai')

P, G, L, T = 2, 3, 40, 40


def config(**changes):
  c = configs.default()
  c.model, c.mode, c.steps = 'scratch', 'split', 3
  c.scratch.update(width=16, layers=1, heads=2, kv_heads=1, mlp=32, max_tokens=96)
  c.prompts, c.rollouts, c.prompt_tokens, c.completion_tokens = P, G, L, T
  c.data.source, c.data.size, c.data.chat = 'digits', 8, False
  c.data.tasks = (dict(name='copy', min_length=1, max_length=3),)
  c.environment.fn, c.environment.judge, c.evaluation.prompts = 'endpoint', 'environment', 0
  c.environment.update(harness='agents:asks_twice', workers=2, deadline_s=60.0, cpu_s=60.0)
  c.optimizer.learning_rate = 1e-1
  for name, value in changes.items():
    part, _, leaf = name.rpartition('__')
    (c[part] if part else c)[leaf] = value
  return c


def made(**changes):
  c = config(**changes)
  return setup.build_context(c, sharding.make_mesh(c.mesh, jax.devices()[:1]))


def run(context, count, state=None, batch=None, start=0, pool=None):
  """`count` steps as train takes them → the state and batch behind them, and what each step sampled and landed."""
  call, history = endpoint.compile_call(context), []
  state = state or train_state.init_state(context.spec, context.models.policy.params)
  batch = batch or empty_records.empty_batch(context.spec)
  for index in range(start, start + count):
    inputs = host_step.build_inputs(context, index)
    state, rollout, device = call(state, batch, *inputs)
    prompts = context.episodes.prompts_of(inputs[0])
    landed = host_step.land(context, pool, host_step.PendingStep(index, prompts, rollout, device))
    batch = landed.batch
    history.append((jax.device_get(state.params), prompts, rollout, landed))
  return jax.device_get(state), batch, history


@pytest.fixture(scope='module', autouse=True)
def log_folder(request, tmp_path_factory):
  """Agents can be imported, here and in workers, and write into this folder."""
  with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(request.path.parent))
    patch.setenv('PYTHONPATH', str(request.path.parent), prepend=':')
    folder = tmp_path_factory.mktemp('agents')
    patch.setenv('AGENT_LOG', str(folder))
    yield folder


@pytest.fixture(scope='module')
def trained(log_folder):
  context = made()
  result = run(context, 2)
  yield context, *result
  context.episodes.close()


def log_probs(context, params, prompts, rollout, b):
  """The log-probs of a row's tokens by one plain forward pass over prompt and completion."""
  prompt = prompts.tokens_PxL[b // G][: prompts.length_P[b // G]]
  tokens = np.concatenate([prompt, rollout.tokens_BxT[b][: rollout.length_B[b]]])[None]
  positions = np.arange(tokens.shape[1])[None]
  mask = decoder.causal(positions >= 0)
  model = context.spec.model.config
  hidden, _, _ = decoder.apply(model, params, tokens, positions, mask, dtype='float32')
  logits = decoder.head(model, params, hidden[0], 'float32')
  logp = np.asarray(jax.nn.log_softmax(logits / context.config.temperature))
  at = np.arange(len(prompt), tokens.shape[1])
  return logp[at - 1, tokens[0, at]]


def test_log_probs_are_those_of_the_policy_of_the_step(trained):
  """The second step is served with the updated weights: their log-probs agree, those of the first weights do not."""
  context, _, _, history = trained
  for step, (params, prompts, rollout, _) in enumerate(history):
    for b in range(P * G):
      sampled = rollout.turns.number_BxT[b, : rollout.length_B[b]] >= 0
      recorded = rollout.logp_BxT[b, : rollout.length_B[b]][sampled]
      assert sampled.sum() > 1
      again = log_probs(context, params, prompts, rollout, b)[sampled]
      np.testing.assert_allclose(recorded, again, atol=1e-4)
      if step == 1:
        old = log_probs(context, history[0][0], prompts, rollout, b)[sampled]
        assert np.abs(recorded - old).max() > 1e-2


def test_rows_hold_the_ids_that_the_client_got(trained, log_folder):
  """The agent wrote down the ids and log-probs of its responses: rows hold these in order, and mask the rest."""
  _, _, _, history = trained
  records = [json.loads(path.read_text()) for path in log_folder.iterdir()]
  by_ids = {tuple(sum(map(last_ids, record['got'][-1:]), [])): record for record in records}
  assert len(by_ids) == len(records) == 2 * P * G
  for _, prompts, rollout, landed in history:
    for b in range(P * G):
      length, number_T = rollout.length_B[b], rollout.turns.number_BxT[b]
      prompt = prompts.tokens_PxL[b // G][: prompts.length_P[b // G]]
      record = by_ids.pop((*prompt, *rollout.tokens_BxT[b][:length]))
      first, second = record['got']
      assert last_ids(first) == second['prompt_token_ids'][: len(last_ids(first))]
      for turn, response in enumerate((first, second)):
        at = np.flatnonzero(number_T == turn)
        assert rollout.tokens_BxT[b, at].tolist() == response['token_ids']
        np.testing.assert_allclose(
          rollout.logp_BxT[b, at], response['behavior_logprobs'], rtol=1e-6
        )
        assert at[0] == len(response['prompt_token_ids']) - len(prompt)
      assert (number_T >= 0).sum() == len(first['token_ids']) + len(second['token_ids'])
      assert landed.batch.reward_B[b] == pytest.approx(record['reward'], rel=1e-6)
    metrics = landed.metrics
    assert metrics['environment/requests'] == 2 * P * G
    assert metrics['environment/dropped_requests'] == metrics['environment/cut'] == 0
    assert metrics['environment/overridden'] == 2 * P * G  # the policy's temperature counts
  assert not by_ids


def last_ids(response):
  return response['prompt_token_ids'] + response['token_ids']


def test_a_resumed_run_samples_the_same(trained):
  """Another server and other workers, from the state behind the first step."""
  context, state, _, history = trained
  again = made()
  try:
    start = train_state.init_state(again.spec, again.models.policy.params)
    fresh, batch, first = run(again, 1, start)
    _, _, second = run(again, 1, jax.tree.map(np.array, fresh), batch, start=1)
  finally:
    again.episodes.close()
  for got, want in zip([*first, *second], history, strict=True):
    for x, y in zip(jax.tree.leaves(got[2]), jax.tree.leaves(want[2]), strict=True):
      np.testing.assert_array_equal(x, y)


def test_an_edited_context_leaves_the_last_requests(log_folder):
  """The second request does not go on from the first, so that the first is dropped, and counted."""
  context = made(environment__harness='agents:forgets')
  try:
    _, _, ((_, prompts, rollout, landed),) = run(context, 1)
  finally:
    context.episodes.close()
  assert (
    landed.metrics['environment/split'] == landed.metrics['environment/dropped_requests'] == P * G
  )
  assert (rollout.turns.number_BxT.max(1) == 0).all()
  tokenizer = context.models.policy.tokenizer
  for p in range(P):
    assert tokenizer.decode(prompts.tokens_PxL[p][: prompts.length_P[p]].tolist()) == 'anew'


QUESTIONS = dict(fine='12', raises='3', hangs='7', aborts='5', silent='silent')


def test_a_failure_costs_its_episode_alone(log_folder, tmp_path):
  """An exception, a hang, a killed process and a hang before the first request; the reward function scores the rest."""
  data = jsonl(tmp_path / 'rows.jsonl', QUESTIONS.values())
  environment = dict(environment__harness='agents:fragile', environment__judge='rewards')
  context = made(
    prompts=len(QUESTIONS), rollouts=2, environment__deadline_s=6.0, environment__workers=4,
    rewards__failed=dict(timeout='score', crash='drop', error='drop', value=-1.0, stop_share=1.0, stop_steps=9),
    **data, **environment,
  )  # fmt: skip
  try:
    state, _, history = run(context, 2, pool=Pool())
  finally:
    context.episodes.close()
  _, prompts, rollout, landed = history[0]
  rows = {row.question: 2 * p for p, row in enumerate(context.tables.train.rows_of(prompts))}
  want = dict(
    fine=rewards.OK, raises=rewards.ERROR, hangs=rewards.TIMEOUT, aborts=rewards.CRASH, silent=rewards.TIMEOUT
  )  # fmt: skip
  for name, question in QUESTIONS.items():
    for b in (rows[question], rows[question] + 1):
      assert rollout.turns.outcome_B[b] == want[name], name
      sampled = (rollout.turns.number_BxT[b] >= 0).sum()
      assert (sampled == 0) == (name == 'silent')
      length, reward = landed.batch.rollout.length_B[b], landed.batch.reward_B[b]
      assert (length == 0) == (name in ('raises', 'aborts'))
      assert reward == {'fine': 0.5, 'hangs': -1.0, 'silent': -1.0}.get(name, reward)
  assert landed.metrics['grade/timeouts'] == 4
  assert landed.metrics['grade/errors'] == landed.metrics['grade/crashes'] == 2
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.params))


class Pool:
  """Stands for the grading pool."""

  def score(self, rows, texts):
    parts = np.full((len(texts), 1), 0.5, np.float32)
    return rewards.Scores(parts, np.zeros(len(texts), np.int8), {}, '')


def jsonl(path, questions):
  """Settings of data with a row for each question."""
  path.write_text(''.join(json.dumps(dict(question=q, answer=q)) + '\n' for q in questions))
  return dict(data__source='jsonl', data__path=str(path), data__size=0, data__tasks=())


def test_a_command_prints_or_posts_its_reward(request, tmp_path):
  data = jsonl(tmp_path / 'rows.jsonl', ('post', 'print'))
  words = (sys.executable, str(request.path.parent / 'agents.py'))
  context = made(environment__harness='', environment__command=words, **data)
  try:
    _, _, ((_, prompts, rollout, landed),) = run(context, 1)
  finally:
    context.episodes.close()
  want = [
    dict(post=0.25, print=0.75)[row.question] for row in context.tables.train.rows_of(prompts)
  ]
  np.testing.assert_allclose(landed.batch.reward_B, np.repeat(want, G))
  assert (rollout.turns.number_BxT == 0).any(1).all()


def test_a_killed_run_goes_on_as_if_nothing_had_been(tmp_path):
  """SIGKILL behind the second step; the rollouts of the third and fourth are those of a run that was left alone."""
  source = ast.unparse(ast.parse(inspect.getsource(config)).body[0])
  path = tmp_path / 'job.py'
  path.write_text(
    'from jaxrl_llm.config import loading as configs\n'
    f'P, G, L, T = {P}, {G}, {L}, {T}\n{source}\n'
    'def get_config():\n  return config(steps=4, checkpoint__every=1, monitoring__rollouts_every=1)\n'
  )

  def start(name):
    argv = [f'--config={path}', f'--workdir={tmp_path / name}', '--config.mesh.fsdp=1']
    command = [sys.executable, '-m', 'jaxrl_llm.main', *argv]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

  def rollouts(name):
    files = sorted((tmp_path / name / 'rollouts').iterdir())
    return [(file.name, file.read_text()) for file in files]

  assert start('whole').wait(300) == 0
  process, metrics = start('killed'), tmp_path / 'killed' / 'metrics.jsonl'
  while not metrics.exists() or metrics.read_text().count('\n') < 2:
    assert process.poll() is None
    time.sleep(0.05)
  process.kill()
  process.wait()
  assert len(rollouts('killed')) < 4
  assert start('killed').wait(300) == 0
  assert rollouts('killed') == rollouts('whole') and len(rollouts('whole')) == 4


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    (dict(environment__command=('x',)), 'give one of them'),
    (dict(environment__harness=''), 'give one of them'),
    (dict(environment__harness='agents:none'), "has no function 'none'"),
    (dict(evaluation__prompts=4), 'without the harness'),
    (dict(mode='fused'), 'mode=split'),
  ],
)
def test_bad_settings_are_refused_before_anything_is_compiled(changes, message):
  with pytest.raises(UserError, match=message):
    made(**changes)
