"""Reflected retries: the three steps of a prompt, what is learned of them and where, and a restored provider."""

from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np
import pytest
import tiny_job
from small_tokenizers import Letters

from jaxrl_llm import data, objective, train
from jaxrl_llm.checkpointing import checkpoint
from jaxrl_llm.config import loading as configs
from jaxrl_llm.config.schema import DataConfig
from jaxrl_llm.curriculum import hint_rules, reflection
from jaxrl_llm.distributed import sharding
from jaxrl_llm.models import decoder
from jaxrl_llm.runner import reflected_retries
from jaxrl_llm.types import PLAIN, REQUEST, RETRY, STOPPED, Batch, Rollout, Row
from tests.learner import packed_jobs, plain_gradient

G, L, T = 3, 400, 300
SETTINGS = DataConfig(source='digits', template='Q: {question}', chat=False)
PAIRS = ('2+2', 'four'), ('3+3', 'six'), ('1+1', 'two'), ('5+5', 'ten')
WRONG, RIGHT = 'two and\ntwo is\nfive', 'two and\ntwo is\nfour'
REPORT = dict(
  trajectory_summary='s',
  root_cause_analysis='r',
  trajectory_outcome='failure',
  improvement_suggestion='count',
  retry_from_step=2,
)
KEPT, REST = 'two and\ntwo is\n', 'five'
REPLY = 'See: ' + json.dumps(REPORT)
GUIDED = f'Q: 2+2 by {json.dumps(REPORT, indent=2)}' + KEPT


def make(**settings):
  how = dict(request='Why {question}? {attempt}', guidance='{question} by {report}')
  rows = [Row(str(i), q, (), a, 'made', {}) for i, (q, a) in enumerate(PAIRS)]
  table = data.make_table(rows, SETTINGS, L, Letters())
  rule = hint_rules.reflected(**(how | settings))
  return reflected_retries.ReflectedRetries(rule, table, Letters(), SETTINGS, seed=0)


def prompt_texts(prompts):
  rows = zip(prompts.tokens_PxL, prompts.length_P, strict=True)
  return [Letters().decode(tokens[:n].tolist()) for tokens, n in rows]


def row_texts(batch):
  """The completions of each slot."""
  rows = zip(batch.rollout.tokens_BxT, batch.rollout.length_B, strict=True)
  said = [Letters().decode(tokens[:n].tolist()) for tokens, n in rows]
  return [said[b : b + G] for b in range(0, len(said), G)]


def rollout_of(said, salt=0.0):
  """Rows that say these texts and then end, with log-probs of their own; '' is a row that was dropped."""
  tokens_BxT = np.zeros((len(said), T), np.int32)
  for row, text in zip(tokens_BxT, said, strict=True):
    row[: len(text)] = Letters().encode(text)
  length_B = np.array([len(text) + 1 if text else 0 for text in said], np.int32)
  logp_BxT = -salt - 0.01 * np.arange(tokens_BxT.size, dtype=np.float32).reshape(tokens_BxT.shape)
  logp_BxT *= np.arange(T) < length_B[:, None]
  reason_B = np.full(len(said), STOPPED, np.int8)
  version_BxT = 7 * (np.arange(T) < length_B[:, None]).astype(np.int32)
  ones_B, none = np.ones(len(said), np.float32), np.zeros((len(said), 0), np.float32)
  return Rollout(tokens_BxT, logp_BxT, length_B, reason_B, version_BxT, ones_B, none)


class Visit:
  """One step of the host loop: slots of these prompts, whose rows say these texts; those with `four` are right."""

  def __init__(self, own, index, said, salt=0.0):
    self.prompts = own.add_hints(own.table.prompts(list(index)), 0)
    self.texts = prompt_texts(self.prompts)
    self.rollout, self.received = own.receive(self.prompts, rollout_of(said, salt))
    self.prefixes = own.prefixes(self.prompts)
    right_B = np.array(['four' in text for text in said], np.float32)
    right_B *= self.rollout.length_B > 0
    self.graded = Batch(self.prompts, self.rollout, right_B, right_B, success_B=right_B)
    self.learned, self.metrics = own.update(self.graded, np.ones(len(index), bool))


def attempted(own, said=(RIGHT, WRONG, WRONG)):
  return Visit(own, [0], said, salt=1.0)


def reflected(own, said=('no', REPLY, REPLY)):
  own.due(9)
  return Visit(own, [0], said, salt=2.0)


def retried(own, said=('four!', 'five?', 'four?')):
  own.due(9)
  return Visit(own, [0], said, salt=3.0)


def test_attempts_of_which_one_failed_wait_for_a_reflection_on_it():
  own = make()
  visit = Visit(own, [0, 1, 2], (RIGHT, WRONG, 'no', *[RIGHT] * 6))
  assert visit.texts == ['Q: 2+2', 'Q: 3+3', 'Q: 1+1']
  assert visit.prompts.context_P.tolist() == [PLAIN] * 3
  assert row_texts(visit.learned) == [[''] * 3, [RIGHT] * 3, [RIGHT] * 3]
  assert own.waiting.tolist() == [0] and own.due(5).tolist() == [0] and len(own.waiting) == 0
  asked = own.add_hints(own.table.prompts([0, 1]), 1)
  want = 'Why 2+2? Step 0: two and\nStep 1: two is\nStep 2: five'
  assert prompt_texts(asked) == [want, 'Q: 3+3']
  assert asked.context_P.tolist() == [REQUEST, PLAIN] and asked.hint_P.tolist() == [1, 0]


def test_without_a_valid_reflection_the_attempts_are_learned_as_they_are_in_its_slot():
  own = make()
  attempts = attempted(own)
  assert (attempts.learned.rollout.length_B == 0).all()
  said = json.dumps(REPORT | dict(trajectory_outcome='success')), 'no', REPLY.replace('2}', '3}')
  visit = reflected(own, said)
  assert visit.received == {'hint/requests': 1, 'hint/reflections': 0}
  assert (visit.rollout.length_B == 0).all()  # neither graded nor learned
  for got, want in zip(
    jax.tree.leaves(visit.learned), jax.tree.leaves(attempts.graded), strict=True
  ):
    np.testing.assert_array_equal(got, want)
    assert got.dtype == want.dtype
  assert not own.cases and not len(own.waiting) and not len(own.slots)
  assert prompt_texts(own.add_hints(own.table.prompts([0]), 3)) == ['Q: 2+2']


def test_a_retry_begins_at_the_pivot_and_is_learned_without_its_guidance():
  own = make()
  attempts = attempted(own)
  visit = reflected(own)
  assert visit.received == {'hint/requests': 1, 'hint/reflections': 1}
  assert (visit.learned.rollout.length_B == 0).all() and own.waiting.tolist() == [0]
  retries = retried(own)
  assert retries.texts == [GUIDED] and retries.prompts.context_P.tolist() == [RETRY]
  assert [Letters().decode(x.tolist()) for x in retries.prefixes] == [KEPT]
  learned = retries.learned
  assert prompt_texts(learned.prompts) == ['Q: 2+2' + KEPT]
  assert row_texts(learned) == [[REST, 'four!', 'five?']]  # the attempt replaces the last retry
  assert learned.reward_B.tolist() == [0, 1, 0] == learned.correct_B.tolist()
  # Each token has the log-prob and the version of its own sampling.
  start, count = len(KEPT), len(REST) + 1
  got, want = learned.rollout, attempts.graded.rollout
  np.testing.assert_array_equal(got.logp_BxT[0, :count], want.logp_BxT[1, start : start + count])
  np.testing.assert_array_equal(got.logp_BxT[1:], retries.rollout.logp_BxT[:2])
  assert (got.version_BxT[0, :count] == 7).all() and got.weight_B.tolist() == [1, 1, 1]
  assert prompt_texts(own.add_hints(own.table.prompts([0]), 3)) == ['Q: 2+2']


def test_the_other_attempts_are_learned_with_the_baseline_of_all():
  """The attempt that was retried counts for the mean, and has no loss of its own there."""
  own = make()
  attempts = attempted(own)
  reflected(own)
  assert retried(own).metrics['hint/waiting_slots'] == 3
  visit = Visit(own, [1], ['', '', ''])  # an empty slot
  learned = visit.learned
  assert row_texts(learned) == [[RIGHT, WRONG, WRONG]]
  assert learned.rollout.weight_B.tolist() == [1, 0, 1]
  np.testing.assert_array_equal(learned.reward_B, attempts.graded.reward_B)
  method = objective.method(packed_jobs.settings(advantage='amplified', aggregation='token_mean'))
  target = objective.targets(method, learned, G)
  np.testing.assert_allclose(target.advantage_BxT[:, 0], [0.5, -1 / 6, -1 / 6])
  weight_B = np.asarray(target.weight_BxT).sum(1)
  assert weight_B[1] == 0 and (weight_B[[0, 2]] > 0).all()


def test_the_reflection_and_the_guided_retry_of_an_improvement_are_learned_as_rows_with_reward_1():
  own = make()
  attempted(own)
  reflected(own)
  retries = retried(own, ('five?', 'four!', 'four?'))
  assert retries.metrics['hint/retries'] == retries.metrics['hint/improved'] == 1
  found = [Visit(own, [1], ['', '', '']).learned for _ in range(4)]
  want = 'Why 2+2? Step 0: two and\nStep 1: two is\nStep 2: five'
  assert [prompt_texts(x.prompts) for x in found[1:]] == [[want], [GUIDED], ['']]
  assert [row_texts(x) for x in found[1:]] == [[[REPLY, '', '']], [['four!', '', '']], [[''] * 3]]
  assert [x.reward_B[0] for x in found[1:]] == [1, 1, 0]
  np.testing.assert_array_equal(found[2].rollout.logp_BxT[0, :6], retries.rollout.logp_BxT[1, :6])


@pytest.mark.parametrize('said', [['five?'] * 3, ['', 'five?', 'no']])
def test_without_an_improvement_neither_is_learned(said):
  own = make()
  attempted(own)
  reflected(own)
  retries = retried(own, said)
  assert retries.metrics['hint/improved'] == 0 and retries.metrics['hint/waiting_slots'] == 1
  rows = [said[0] or said[2], said[1]] if said[0] == '' else said[:2]
  assert sorted(row_texts(retries.learned)[0]) == sorted([REST, *rows])  # in place of an empty row


def test_retries_that_were_all_dropped_leave_the_attempts():
  own = make()
  attempts = attempted(own)
  reflected(own)
  visit = retried(own, ['', '', ''])
  assert not own.cases
  for got, want in zip(
    jax.tree.leaves(visit.learned), jax.tree.leaves(attempts.graded), strict=True
  ):
    np.testing.assert_array_equal(got, want)


def test_a_pivot_of_0_keeps_nothing():
  own = make()
  attempted(own)
  reflected(own, [json.dumps(REPORT | dict(retry_from_step=0))] * 3)
  retries = retried(own)
  assert [len(x) for x in retries.prefixes] == [0]
  assert prompt_texts(retries.learned.prompts) == ['Q: 2+2']
  assert row_texts(retries.learned)[0][0] == WRONG


def test_what_does_not_fit_is_not_asked_and_not_retried():
  own = make(request='{question} {attempt}' + 'x' * L)
  attempts = attempted(own)
  assert row_texts(attempts.learned) == [[RIGHT, WRONG, WRONG]] and not len(own.waiting)
  own = make(guidance='{question} {report}' + 'x' * L)
  attempted(own)
  assert reflected(own).received['hint/reflections'] == 0
  own = make()  # an attempt without a step has no pivot
  assert row_texts(attempted(own, (RIGHT, ' \n', WRONG)).learned) == [[RIGHT, ' \n', WRONG]]


def test_a_report_that_no_tokenizer_reads_is_changed():
  own = make()
  attempted(own)
  reflected(own, [json.dumps(REPORT | dict(improvement_suggestion='\ud83d'))] * 3)
  text = retried(own).texts[0]
  assert '"improvement_suggestion": "?"' in text and text.encode()


def test_groups_that_are_unfinished_decide_nothing():
  own = make()
  prompts = own.add_hints(own.table.prompts([0]), 0)
  wrong_B = np.zeros(G, np.float32)
  batch = Batch(prompts, rollout_of([WRONG] * G), wrong_B, wrong_B, success_B=wrong_B)
  learned, _ = own.update(batch, np.array([False]))
  assert not own.cases and row_texts(learned) == [[WRONG] * G]


def test_rows_that_wait_on_are_at_most_those_of_two_batches():
  own = make()
  attempted(own)
  reflected(own)
  case = own.cases[0]
  own.slots.singles += [case.reply] * 5
  Visit(own, [1], [RIGHT] * G)
  assert len(own.slots) == 2
  own.slots.groups += [case.group] * 5
  Visit(own, [1], [RIGHT] * G)
  assert len(own.slots) == 7


def saved(own, folder):
  """A provider after a checkpoint of the other one."""
  checkpoint.save(str(folder), 1, dict(x=np.zeros(1)), own.state_dict(), keep=1)
  _, host = checkpoint.restore(str(folder), 1, dict(x=np.zeros(1)))
  other = make()
  other.load_state_dict(host)
  return other


@pytest.mark.parametrize('visits', range(4))
def test_a_restored_provider_goes_on_bit_for_bit(visits, tmp_path):
  own = make()
  steps = attempted, reflected, retried, lambda own: Visit(own, [1, 2], [''] * 6)
  for step in steps[:visits]:
    step(own)
  other = saved(own, tmp_path)
  assert other.waiting.tolist() == own.waiting.tolist()
  for step in steps[visits:]:
    one, two = step(own), step(other)
    assert one.texts == two.texts and one.metrics == two.metrics
    assert one.received == two.received
    for a, b in zip(jax.tree.leaves(one.learned), jax.tree.leaves(two.learned), strict=True):
      np.testing.assert_array_equal(a, b)
      assert a.dtype == b.dtype


def test_the_gradient_is_that_of_whole_rows_masked_before_the_pivot():
  """The kept steps have a coefficient of exactly 0 in the attempt and in its retries."""
  own = make()
  attempted(own)
  reflected(own)
  learned = retried(own).learned
  model = dataclasses.replace(packed_jobs.MODEL, vocab=128, max_tokens=L + T)
  sizes = dict(prompts=1, rollouts=G, prompt_tokens=L, completion_tokens=T)
  spec = packed_jobs.make(model, **sizes)
  spec = packed_jobs.with_method(
    spec, advantage='amplified', ratio='one', trust_region='none', aggregation='token_mean'
  )
  params = decoder.init(model, 0)
  whole_rollout = rollout_of([KEPT + text for text in row_texts(learned)[0]])
  whole = Batch(own.table.prompts([0]), whole_rollout, learned.reward_B, learned.correct_B)
  method, start = spec.objective.method, len(KEPT)

  def coefficients(batch):
    logp_BxT = plain_gradient.scores(spec, params, batch).logp
    return objective.coefficients(method, objective.targets(method, batch, G), logp_BxT)[0]

  c_BxT = np.asarray(coefficients(learned))
  shifted_BxT = np.pad(c_BxT, ((0, 0), (start, 0)))[:, :T]
  assert (shifted_BxT[:, :start] == 0).all() and (shifted_BxT[:, start] != 0).all()

  def gradient(batch, c_BxT):
    def loss(params):
      return plain_gradient.minus_sum(c_BxT, plain_gradient.scores(spec, params, batch).logp)

    return jax.tree.leaves(jax.grad(loss)(params))

  got, want, unmasked = (
    gradient(*pair)
    for pair in ((learned, c_BxT), (whole, shifted_BxT), (whole, coefficients(whole)))
  )
  largest = max(float(abs(x).max()) for x in want)
  for a, b in zip(got, want, strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5 * largest)
  assert any(abs(a - b).max() > 1e-2 * largest for a, b in zip(want, unmasked, strict=True))


REFLECTED = dict(
  prompts=4,
  rollouts=4,
  steps=8,
  prompt_tokens=24,
  curriculum=dict(
    hint=dict(fn='reflected', request='{question}{attempt}', guidance='{question}{report}'),
    candidates=dict(fn='stream', multiple=1),
  ),
  objective=dict(
    advantage=dict(fn='amplified'),
    ratio=dict(fn='one'),
    trust_region=dict(fn='none'),
    kl=dict(fn='k2', coef=0.001),
  ),
  checkpoint=dict(every=4, keep=1),
  **tiny_job.UNTAUGHT,
)


@pytest.mark.parametrize('mode', ['fused', 'lag'])
def test_a_continued_run_is_the_uninterrupted_one(mode, tmp_path, monkeypatch):
  """A character model: every reply is a report, and every character a step."""
  report = reflection.Report('12', 1)
  monkeypatch.setattr(reflection.Reflection, 'report_in', lambda *_: report)
  monkeypatch.setattr(reflection, 'steps_of', list)
  monkeypatch.setattr(reflection, 'numbered', str)
  monkeypatch.setattr(reflection, 'tokens_before', lambda ids, decode, pivot: pivot)
  file = tiny_job.config_file(tmp_path, **REFLECTED, mode=mode)

  def run(folder, *overrides):
    c = configs.load(file, list(overrides))
    train.run(c, str(tmp_path / folder), sharding.make_mesh(c.mesh, jax.devices()[:1]))
    return tiny_job.rows(tmp_path / folder)

  whole = run('whole')
  run('run', '--config.steps=4')
  assert run('run') == whole
  total = {name: sum(row[name] for row in whole) for name in whole[0] if name.startswith('hint/')}
  assert total['hint/requests'] == total['hint/reflections'] >= total['hint/retries'] > 3
  assert total['hint/improved'] > 0
  waiting = [row['hint/waiting_slots'] for row in whole]
  assert mode == 'lag' or waiting[3] > waiting[4], waiting  # learned after the restart
  assert max(waiting) > 0
