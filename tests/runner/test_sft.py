"""The supervised start: packed rows are the rows they are made of, and a run may be nothing else."""

from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np
import pytest
import tiny_job
from test_step import MODEL, assert_close, config

from jaxrl_llm import data, models, objective, train
from jaxrl_llm.commands.evaluate import evaluate_checkpoint
from jaxrl_llm.commands.export import export_checkpoint
from jaxrl_llm.commands.generate import generate_text
from jaxrl_llm.config import loading as configs
from jaxrl_llm.data.tasks import make_row
from jaxrl_llm.distributed import sharding
from jaxrl_llm.learner import microbatch, minibatch
from jaxrl_llm.learner import state as train_state
from jaxrl_llm.learner.spec_from_config import make_spec
from jaxrl_llm.models import decoder
from jaxrl_llm.runner import sft as sft_lib
from jaxrl_llm.types import UserError

# A layer that slides and one that does not; as many tokens as there are characters.
SLIDING = dataclasses.replace(MODEL, vocab=99, window=3, sliding=(True, False))
WORDS = ('ab', 'c', 'defg', 'hi', 'jklmno', 'p', 'qrs', 'tu', 'vwxyz', 'aa', 'bcb', 'dd')


def job(**sft):
  """A config, its likelihood program, a table of demonstrations of many lengths, and a tokenizer."""
  c = config(prompt_tokens=12, completion_tokens=10)
  c.data.chat = False
  c.sft.update(dict(steps=3, prompts=len(WORDS)) | sft)
  mesh = sharding.make_mesh(c.mesh, jax.devices()[:1])
  spec = sft_lib.likelihood(c, make_spec(c, SLIDING, (3, 7), mesh))
  rows = [make_row('toy', f'{word}=', word[::-1], {}) for word in WORDS[:-2]]
  rows += [make_row('toy', f'{w}=', '', dict(solution=f'{w[0]}! {w}')) for w in WORDS[-2:]]
  tokenizer = models.load('scratch', scratch=c.scratch).tokenizer
  return c, spec, data.make_table(rows, c.data, 12, tokenizer), tokenizer


def learned(spec, batch, params):
  """The loss and its gradient."""
  target = objective.targets(spec.objective.method, batch, 1)
  pieces = microbatch.microbatches(spec, batch, target)
  piece = jax.tree.map(lambda x: x[0], pieces)
  loss = lambda params: minibatch.microbatch_loss(spec, params, *piece)[0]  # noqa: E731
  return jax.jit(jax.value_and_grad(loss))(params)


def test_packed_is_unpacked_in_loss_and_gradient():
  """All demonstrations once, in 12 rows and in 5: the same mean over the same tokens, whatever shares a row."""
  params = decoder.init(SLIDING, 0)
  c, spec, table, tokenizer = job()
  apart = sft_lib.batch(c, np.random.default_rng(0), table, tokenizer)
  want, want_grad = learned(spec, apart, params)
  c, spec, table, tokenizer = job(prompts=5, pack_tokens=24)
  drawn = list(zip(table.tokens, table.rows, strict=True))
  prompts, rollout, count = data.pack_demonstrations(drawn, tokenizer, 10, 5, 24)
  assert count == len(WORDS) and (rollout.length_B > 0).all()
  together = apart._replace(
    prompts=prompts, rollout=rollout, reward_B=np.ones(5, np.float32), correct_B=np.ones(5)
  )
  got, got_grad = learned(spec, together, params)
  np.testing.assert_allclose(got, want, rtol=1e-6)
  assert_close(got_grad, want_grad, 1e-6)


def test_packing_fills_rows_with_whole_demonstrations():
  """First fit: no row is wider than told, segments are prompt and reply, and replies alone are said."""
  c, _, table, tokenizer = job(prompts=4, pack_tokens=30)
  batch = sft_lib.batch(c, np.random.default_rng(1), table, tokenizer)
  end, known = tokenizer.decode([list(tokenizer.end_ids)[0]]), set()
  for row in table.rows:
    known.add((row.question, data.demonstration(row)))
  rollout, segment_PxT = batch.rollout, batch.prompts.segment_PxT
  assert rollout.tokens_BxT.shape == segment_PxT.shape == (4, 30)
  for tokens, segment, turn, length in zip(
    rollout.tokens_BxT, segment_PxT, rollout.turns.number_BxT, rollout.length_B, strict=True
  ):
    assert length > 20 and (segment[:length] > 0).all() and not segment[length:].any()
    assert (turn[length:] == -1).all() and segment.max() >= 2
    for number in range(1, segment.max() + 1):
      own = segment == number
      asked, said = tokens[own & (turn < 0)], tokens[own & (turn == 0)]
      assert (tokenizer.decode(asked), tokenizer.decode(said).removesuffix(end)) in known
      assert said[-1] in tokenizer.end_ids
  again = sft_lib.batch(c, np.random.default_rng(1), table, tokenizer)
  np.testing.assert_array_equal(again.rollout.tokens_BxT, rollout.tokens_BxT)


def test_a_demonstration_wider_than_a_row_is_told():
  c, _, table, tokenizer = job(prompts=1, pack_tokens=9)
  with pytest.raises(UserError, match='config.sft.pack_tokens=9 is less than the'):
    for seed in range(9):
      sft_lib.batch(c, np.random.default_rng(seed), table, tokenizer)


def test_a_run_may_be_the_supervised_start_alone(tmp_path, capsys, monkeypatch):
  """Packed; evaluated once, saved as step 0, and not begun again by a second start."""
  sft = dict(steps=12, learning_rate=1e-2, prompts=4, pack_tokens=48)
  monkeypatch.setattr(sft_lib, '_CONSOLE_INTERVAL_S', -1.0)
  told = dict(every=0, prompts=4, samples=0)
  c = configs.load(tiny_job.config_file(tmp_path, steps=0, sft=sft, evaluation=told))

  def run():
    train.run(c, str(tmp_path / 'run'), sharding.make_mesh(c.mesh, jax.devices()[:1]))
    return capsys.readouterr().out

  told = run()
  first, last = (float(x.split()[0]) for x in told.split('loss ')[1].split(' -> '))
  assert last < first - 0.5
  rows = [json.loads(line) for line in (tmp_path / 'run/sft.jsonl').read_text().splitlines()]
  assert [row['training/global_step'] for row in rows] == list(range(12))
  losses = [row['sft/loss'] for row in rows]
  assert [f'{x:.2f}' for x in (losses[0], losses[-1])] == [f'{x:.2f}' for x in (first, last)]
  # The last step says what was gained instead.
  said = [line.split('warm start: ')[1] for line in told.splitlines() if 'warm start: ' in line]
  assert [line.split(' steps')[0] for line in said[:-1]] == [f'{n} of 12' for n in range(1, 12)]
  assert float(said[3].split()[4]) == round(losses[3], 2)
  saved = tmp_path / 'run/checkpoints/step_000000/manifest.json'
  before = saved.stat().st_mtime_ns, saved.read_text()
  assert [p.name for p in (tmp_path / 'run/eval').iterdir()] == ['step_000000.json']
  assert 'warm start' not in run()
  assert json.loads(before[1]) and (tmp_path / 'run/metrics.jsonl').read_text() == ''


@pytest.mark.parametrize(
  'ask',
  [
    lambda c, to: evaluate_checkpoint(c, to),
    lambda c, to: export_checkpoint(c, to, f'{to}/export', 'float32'),
    lambda c, to: generate_text(c, to, ['2'], 1),
  ],
  ids=('eval', 'export', 'generate'),
)
def test_what_a_supervised_start_has_not_taught_is_not_taken_for_step_0(tmp_path, ask, monkeypatch):
  """Nothing is written, so that the same folder may be asked for the model as it is."""
  c = configs.load(tiny_job.config_file(tmp_path))
  monkeypatch.setattr(
    train_state, 'init_state', lambda *_: pytest.fail('weights as they were loaded')
  )
  with pytest.raises(
    UserError, match='config.sft.steps=100 begins a run with .*run has no checkpoint'
  ):
    ask(c, str(tmp_path / 'run'))
  assert not (tmp_path / 'run').exists()
