"""A policy whose chat template offers a server's tools is trained on the ids that it sampled between the results."""

from __future__ import annotations

import json
import os
import pathlib
import sys

import jax
import numpy as np
import pytest
import scripted_model

from jaxrl_llm import rewards
from jaxrl_llm.config import loading as configs
from jaxrl_llm.distributed import sharding
from jaxrl_llm.learner import empty_records
from jaxrl_llm.learner import state as train_state
from jaxrl_llm.runner import host_step, multi_turn, setup
from jaxrl_llm.types import UserError

SERVER = pathlib.Path(__file__).parents[1] / 'environments' / 'mcp_server.py'
P, G, L, T = 2, 2, 320, 96


def config(folder, **changes):
  c = configs.default()
  c.model, c.mode, c.steps = str(folder / 'model'), 'split', 2
  c.prompts, c.rollouts, c.prompt_tokens, c.completion_tokens = P, G, L, T
  c.data.source, c.data.path, c.data.size = 'jsonl', str(folder / 'rows.jsonl'), 0
  c.rewards.fn, c.evaluation.prompts, c.optimizer.learning_rate = 'first_number', 0, 1e-3
  server = dict(command=sys.executable, args=(str(SERVER),), tools=('add',))
  server['env'] = dict(PYTHONPATH=os.pathsep.join(sys.path))
  c.environment.update(dict(fn='mcp', role='tool', workers=1, turns=3, servers=dict(sums=server)))
  c.environment.update(dict(timeout_s=60.0, deadline_s=90.0, cpu_s=90.0, weight=0.0))
  for name, value in changes.items():
    part, _, leaf = name.rpartition('__')
    (c[part] if part else c)[leaf] = value
  return c


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  pytest.importorskip('mcp.server.mcpserver', reason='the tests need mcp>=2')
  folder = tmp_path_factory.mktemp('job')
  scripted_model.write(folder / 'model', max_tokens=L + T)
  # The scripted model calls add with a = 2 behind CALL, and writes a malformed call behind CUT.
  rows = [dict(question=question, answer='42') for question in ('CALL', 'CUT')]
  (folder / 'rows.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
  return folder


def build(folder, **changes):
  c = config(folder, **changes)
  return setup.build_context(c, sharding.make_mesh(c.mesh, jax.devices()[:1]))


class Pool:
  """Stands for the grading pool: odd texts are right."""

  def score(self, rows, texts):
    parts_BxK = np.array([[len(text) % 2] for text in texts], np.float32)
    return rewards.Scores(parts_BxK, np.zeros(len(texts), np.int8), {}, '')


def test_calls_are_sampled_and_results_are_masked(folder):
  context = build(folder)
  tokenizer, call = context.models.policy.tokenizer, multi_turn.compile_call(context)
  state = train_state.init_state(context.spec, context.models.policy.params)
  batch = empty_records.empty_batch(context.spec)
  for step in range(2):
    prompts, *more = host_step.build_inputs(context, step)
    state, rollout, device = call(state, batch, prompts, *more)
    landed = host_step.land(context, Pool(), host_step.PendingStep(step, prompts, rollout, device))
    batch, rollout = landed.batch, sharding.fetch(rollout)
    rows = context.tables.train.rows_of(prompts)
    for b in range(P * G):
      question = rows[b // G].question
      check_prompt(tokenizer, prompts.tokens_PxL[b // G][: prompts.length_P[b // G]], question)
      check_row(tokenizer, rollout, b, question)
    answers = zip(rollout.tokens_BxT, rollout.turns.number_BxT, strict=True)
    texts = [context.episodes.turn_texts(*x)[-1] for x in answers]
    assert batch.reward_B.tolist() == [len(text) % 2 for text in texts]
    assert landed.metrics['environment/worker_deaths'] == 0
  context.episodes.close()


def check_prompt(tokenizer, tokens, question):
  """The prompt is the template's text with the tool, as the server lists it."""
  text = tokenizer.decode(tokens.tolist(), False)
  before, _, rest = text.partition('<tools>')
  listed, _, after = rest.partition('</tools>')
  (tool,) = json.loads(listed)
  assert (before, after, tool['function']['name']) == ('', question, 'add')
  assert tool['function']['parameters']['properties']['b']['default'] == 40


def check_row(tokenizer, rollout, b, question):
  """The first turn is the script, piece for piece; then the result in the template's text, which is no turn."""
  script = next(pieces for pieces in scripted_model.SCRIPTS if pieces[0] == question)[1:]
  tokens_T, number_T = rollout.tokens_BxT[b], rollout.turns.number_BxT[b]
  length = rollout.length_B[b]
  ids = [tokenizer.backend.token_to_id(piece) for piece in script]
  assert tokens_T[: len(ids)].tolist() == ids and (number_T[: len(ids)] == 0).all()
  shown = dict(CALL='42', CUT='error: a call is no JSON')[question]
  result = tokenizer.encode(f'<result>{shown}</result>')
  at = slice(len(ids), len(ids) + len(result))
  assert tokens_T[at].tolist() == result and (number_T[at] == -1).all()
  assert number_T[at.stop] == 1 and at.stop < length
  assert (rollout.logp_BxT[b, : len(ids)] > -0.1).all() and (rollout.logp_BxT[b, at] == 0).all()


def test_a_template_without_tools_is_one_sentence(folder, tmp_path):
  with pytest.raises(UserError, match="fn='mcp': config.data.chat=False renders no tools"):
    build(folder, data__chat=False)
  for source in (folder / 'model').iterdir():
    (tmp_path / source.name).write_bytes(source.read_bytes())
  (tmp_path / 'chat_template.jinja').write_text('{{ messages[-1].content }}')
  with pytest.raises(UserError, match='renders no tools; set config.environment.calls, or take'):
    build(folder, model=str(tmp_path))
