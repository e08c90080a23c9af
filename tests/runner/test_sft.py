"""The supervised start: demonstrations share bins and nothing else, and a run may be nothing but a start."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
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
  """The mean of −log π over all tokens, and the gradient of the loss."""
  target = objective.targets(spec.objective.method, batch, 1)

  def run(state, batch):
    return minibatch.gradient(spec, state, microbatch.pack(spec, batch), target)

  grads, sums = jax.jit(run)(train_state.init_state(spec, params), batch)
  return sums['kl'] / sums['tokens'], grads.params


def one_by_one(batch, params):
  """As `learned`, by a plain forward pass over each demonstration behind its prompt."""
  prompts, rollout = batch.prompts, batch.rollout
  width = prompts.tokens_PxL.shape[1] + rollout.tokens_BxT.shape[1]
  rows, said = (np.zeros((len(rollout.length_B), width), np.int32) for _ in range(2))
  for b, (start, length) in enumerate(zip(prompts.length_P, rollout.length_B, strict=True)):
    rows[b, :start] = prompts.tokens_PxL[b, :start]
    rows[b, start : start + length] = rollout.tokens_BxT[b, :length]
    said[b, start : start + length] = 1
  mask = np.arange(width) < (prompts.length_P + rollout.length_B)[:, None]

  def loss(params):
    logp = jax.nn.log_softmax(decoder.forward(SLIDING, params, rows, mask))
    logp = jnp.take_along_axis(logp[:, :-1], rows[:, 1:, None], axis=-1)[..., 0]
    return -(said[:, 1:] * logp).sum() / said.sum()

  return jax.jit(jax.value_and_grad(loss))(params)


@pytest.mark.parametrize('tokens, bins', [(21, 2), (33, 3), (200, 1)])
def test_packed_demonstrations_are_learned_as_one_by_one(tokens, bins):
  """All demonstrations once, in bins of several sizes: the same mean over the same tokens, whatever shares a bin."""
  params = decoder.init(SLIDING, 0)
  c, spec, table, tokenizer = job()
  size = spec.update.packing._replace(bins=bins, tokens=tokens, predicted=tokens, rows=12)
  spec = spec._replace(update=spec.update._replace(packing=size))
  batch = sft_lib.batch(c, np.random.default_rng(0), table, tokenizer)
  used = int(microbatch.pack(spec, jax.tree.map(jnp.asarray, batch)).plan.bins.sum())
  assert used < len(WORDS) and (used == 1) == (tokens == 200)
  want, want_grad = one_by_one(batch, params)
  got, got_grad = learned(spec, batch, params)
  np.testing.assert_allclose(got, want, rtol=1e-6)
  assert_close(got_grad, want_grad, 1e-6)


def test_demonstrations_of_a_bin_do_not_see_each_other():
  """Other words in one of them change its own log-probabilities and none of the others, bit for bit."""
  params = decoder.init(SLIDING, 0)
  c, spec, table, tokenizer = job()
  batch = jax.tree.map(jnp.asarray, sft_lib.batch(c, np.random.default_rng(0), table, tokenizer))
  score = jax.jit(
    lambda batch: microbatch.all_log_probs(spec, params, microbatch.pack(spec, batch))[0]
  )
  before = np.asarray(score(batch))
  for row in range(len(WORDS)):
    tokens_BxT = batch.rollout.tokens_BxT.at[row].add(1) % SLIDING.vocab
    tokens_PxL = batch.prompts.tokens_PxL.at[row].add(1) % SLIDING.vocab
    other = batch._replace(
      prompts=batch.prompts._replace(tokens_PxL=tokens_PxL),
      rollout=batch.rollout._replace(tokens_BxT=tokens_BxT),
    )
    changed = (np.asarray(score(other)) != before).any(1)
    np.testing.assert_array_equal(changed, np.arange(len(WORDS)) == row)


def test_a_run_may_be_the_supervised_start_alone(tmp_path, capsys, monkeypatch):
  """Evaluated once, saved as step 0, and not begun again by a second start."""
  sft = dict(steps=12, learning_rate=1e-2, prompts=8)
  monkeypatch.setattr(sft_lib, '_CONSOLE_INTERVAL_S', -1.0)
  told = dict(every=0, prompts=4, samples=0)
  c = configs.load(tiny_job.config_file(tmp_path, steps=0, sft=sft, evaluation=told))

  def run():
    train.run(c, str(tmp_path / 'run'), sharding.make_mesh(c.mesh, jax.devices()[:1]))
    return capsys.readouterr().out

  told = run()
  summary = told.split('warm start: loss ')[1].split(' nats')[0]
  first, last = map(float, summary.split(' -> '))
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
    lambda c, to: generate_text(c, to, ['2']),
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
