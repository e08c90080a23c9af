"""Multi-turn rollouts: token ids are never re-encoded, observations have no gradient, episodes are reproducible."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_episodes import G, P, Pool, Result, T, Talks, check_log_probs, config, made, right, run

from jaxrl_llm import objective, rewards
from jaxrl_llm.evaluation import evaluate
from jaxrl_llm.learner import compile as programs
from jaxrl_llm.learner import microbatch, minibatch
from jaxrl_llm.learner import state as train_state
from jaxrl_llm.runner import resume
from jaxrl_llm.types import STOPPED, TRUNCATED, UNFINISHED, UserError


class Once:
  """One turn, and nothing to say."""

  def reset(self, row, seed):
    return None

  def step(self, text):
    return Result(None, 0.0, True)


class Varied(Talks):
  """Of one or four turns: groups end in different steps."""

  def reset(self, row, seed):
    super().reset(row, seed)
    self.turns = 1 + 3 * (seed % 2)


@pytest.fixture(scope='module')
def talked():
  context = made(lambda: Talks())
  return context, *run(context, 2)


def test_one_turn_without_an_answer_is_what_no_environment_is():
  """(a) Tokens and log-probabilities bit for bit, and the weights after two updates to the rounding of two programs."""
  plain = made(environment__fn='none')
  want_state, _, want = run(plain, 3, call=programs.compile_split(plain.spec))
  got_state, _, got = run(made(Once, environment__turns=1, environment__judge='rewards'), 3)
  assert any((w[1].reason_B == STOPPED).any() and w[2].batch.reward_B.std() > 0 for w in want)
  for (_, a, _), (_, b, _) in zip(got, want, strict=True):
    for x, y in zip(*(jax.tree.leaves(r._replace(turns=None)) for r in (a, b)), strict=True):
      np.testing.assert_array_equal(x, y)
  close = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-8)
  jax.tree.map(close, got_state, want_state)


def test_turns_are_numbered_and_what_was_given_lies_between_them(talked):
  context, _, _, history = talked
  for _, rollout, _ in history:
    given = 0
    for b in range(P * G):
      number_T, n = rollout.turns.number_BxT[b], rollout.length_B[b]
      assert (number_T[n:] == -1).all() and number_T[0] == 0 and number_T[n - 1] >= 0
      turns = [k for k, _ in _runs(number_T[:n])]
      assert [k for k in turns if k >= 0] == list(range(max(turns) + 1))
      assert turns[1::2] == [-1] * (len(turns) // 2)
      given += turns.count(-1)
      assert (rollout.logp_BxT[b, :n][number_T[:n] >= 0] < 0).all()
      assert (rollout.logp_BxT[b, :n][number_T[:n] < 0] == 0).all()
    assert given > P * G


def _runs(x):
  edges = np.flatnonzero(np.diff(x)) + 1
  return [(int(part[0]), len(part)) for part in np.split(x, edges)]


def test_the_engine_sees_the_very_ids_that_are_recorded():
  """(c) Every call gets what the last one gave, with ids behind it and nothing else changed."""
  context, seen = made(lambda: Talks()), []
  context.episodes.tokenizer = Muddled(context.episodes.tokenizer)
  play = context.episodes.play

  def watched(sample, *rest):
    def watching(begun):
      got, metrics = sample(begun)
      seen.append((begun, got))
      return got, metrics

    return play(watching, *rest)

  context.episodes.play = watched
  _, _, ((_, rollout, _),) = run(context, 1)
  assert len(seen) > 2
  for (_, gave), (took, _) in zip(seen, seen[1:], strict=False):
    for b in range(P * G):
      n = gave.length_B[b]
      np.testing.assert_array_equal(took.tokens_BxT[b, :n], gave.tokens_BxT[b, :n])
      np.testing.assert_array_equal(took.logp_BxT[b, :n], gave.logp_BxT[b, :n])
  last = seen[-1][1]
  np.testing.assert_array_equal(rollout.tokens_BxT, last.tokens_BxT)
  # Encoding the text of these turns gives other ids than were sampled.
  texts = context.episodes.turn_texts(rollout.tokens_BxT[0], rollout.turns.number_BxT[0])
  said = rollout.tokens_BxT[0][rollout.turns.number_BxT[0] >= 0].tolist()
  assert context.episodes.tokenizer.encode(''.join(texts)) != said


class Muddled:
  """A tokenizer whose texts do not give their ids back: all letters are shown small."""

  def __init__(self, own):
    self.own, self.end_ids = own, own.end_ids

  def __getattr__(self, name):
    return getattr(self.own, name)

  def decode(self, ids):
    return self.own.decode(ids).lower()


def test_recorded_log_probs_are_those_of_one_pass_over_the_whole_row(talked):
  """(b) Turns and what was given in between, teacher-forced."""
  context, _, _, history = talked
  prompts, rollout, _ = history[0]
  check_log_probs(context, prompts, rollout, 2e-5)


METHODS = dict(
  grpo={},
  dapo=dict(
    aggregation=dict(fn='token_mean'), reward_shaping=dict(fn='overlong', buffer_tokens=12)
  ),
  minpro=dict(ratio=dict(fn='prefix_min'), aggregation=dict(fn='token_mean')),
  gspo=dict(ratio=dict(fn='sequence')),
  forking=dict(token_weighting=dict(fn='forking'), kl=dict(fn='k3', coef=0.1)),
)


@pytest.mark.parametrize('name', METHODS)
def test_observations_have_no_gradient_and_no_weight_in_sums(talked, name):
  """(b) No coefficient, and none of the sums, moves with the log-probabilities and entropies of what was given."""
  context, _, batch, _ = talked
  c = config()
  c.objective.advantage = dict(fn='raw', baseline=0.3)
  for stage, spec in METHODS[name].items():
    c.objective[stage] = spec
  method = objective.method(c.objective)
  said = np.asarray(objective.sampled_mask(batch.rollout)) > 0
  given = ~said & (np.arange(T) < batch.rollout.length_B[:, None])
  assert given.sum() > 8
  target = objective.targets(method, batch, G)
  random = np.random.default_rng(0)
  own = batch.rollout.logp_BxT + random.normal(0.05, 0.02, given.shape)
  found = []
  for draw in range(2):
    logp = np.where(given, random.normal(-3, 2, given.shape), own)
    entropy = np.where(given, random.random(given.shape), 0.5)
    if draw:  # other ids were recorded there, too
      rollout = batch.rollout._replace(logp_BxT=np.where(given, -9.0, batch.rollout.logp_BxT))
      target = objective.targets(method, batch._replace(rollout=rollout), G)
    target = target.with_arrays(reference_BxT=jnp.asarray(logp + 0.1))
    found.append(objective.coefficients(method, target, jnp.asarray(logp), jnp.asarray(entropy)))
  (c_BxT, sums), (other_BxT, others) = found
  assert (np.asarray(c_BxT)[given] == 0).all() and (np.asarray(c_BxT)[said] != 0).any()
  np.testing.assert_array_equal(c_BxT, other_BxT)
  assert sums == others
  # All is as if the row had been said in one breath.
  first = np.arange(T) < said.sum(1)[:, None]

  def closed(x_BxT):
    out = np.zeros_like(np.asarray(x_BxT))
    out[first] = np.asarray(x_BxT)[said]
    return out

  rollout = batch.rollout._replace(turns=None, length_B=said.sum(1).astype(np.int32))
  rollout = rollout._replace(logp_BxT=closed(batch.rollout.logp_BxT))
  plain = objective.targets(method, batch._replace(rollout=rollout), G)
  plain = plain.with_arrays(reference_BxT=closed(target.policies.reference_BxT))
  want_BxT, want = objective.coefficients(
    method, plain, *map(jnp.asarray, map(closed, (logp, entropy)))
  )
  np.testing.assert_allclose(closed(c_BxT), want_BxT, rtol=1e-5, atol=1e-7)
  for name, value in want.items():
    np.testing.assert_allclose(sums[name], value, rtol=1e-4, atol=1e-6, err_msg=name)


def test_the_gradient_is_that_of_the_sampled_tokens_alone(talked):
  context, _, _, history = talked
  spec = context.spec
  batch = history[0][2].batch  # of the weights as they began
  batch = batch._replace(reward_B=np.arange(P * G, dtype=np.float32))
  params = context.models.policy.params
  target = objective.targets(spec.objective.method, batch, G)

  def run(state, batch):
    return minibatch.gradient(spec, state, microbatch.pack(spec, batch), target)

  grads, sums = jax.jit(run)(train_state.init_state(spec, params), batch)
  sampled_BxT = objective.sampled_mask(batch.rollout)

  def plain(params):
    logp_BxT, _ = microbatch.log_probs(spec, params, batch.prompts, batch.rollout.tokens_BxT)
    weight = target.weight_BxT * target.advantage_BxT
    return -jnp.where(sampled_BxT > 0, weight * logp_BxT, 0.0).sum()

  want = jax.jit(jax.grad(plain))(params)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, atol=1e-4, rtol=1e-3), grads.params, want
  )
  assert sums['tokens'] == sampled_BxT.sum() and sums['probs_diff_max'] < 0.2


def test_the_same_seed_step_and_prompts_play_the_same_and_a_resumed_run_is_the_uninterrupted_one():
  """(d) Also where a step leaves episodes unfinished: they are replayed from their turns and continue."""
  changes = dict(environment__rounds=1, environment__turns=6, rollout__max_age=9)
  whole_state, _, whole = run(made(Varied, **changes), 7)
  context = made(Varied, **changes)
  state, batch, first = run(context, 5)
  assert len(context.replay.unfinished) and any(
    (r.reason_B == UNFINISHED).any() for _, r, _ in first
  )
  again = made(Varied, **changes)  # a new process: nothing of the old objects is left
  for name in ('curriculum', 'lengths', 'unfinished'):
    resume._stateful(again)[name].load_state_dict(resume._stateful(context)[name].state_dict())
  end_state, _, rest = run(again, 2, state=state, batch=batch, start=5)
  for (_, a, one), (_, b, other) in zip(first + rest, whole, strict=True):
    jax.tree.map(np.testing.assert_array_equal, a, b)
    assert one.rollout_records == other.rollout_records
    replayed = [landed.metrics.pop('environment/replayed') for landed in (one, other)]
    assert one.metrics == other.metrics
    assert replayed[1] == 0 and (replayed[0] > 0) == (one is rest[0][2])
  jax.tree.map(np.testing.assert_array_equal, end_state, whole_state)
  versions = [r.version_BxT[b, : r.length_B[b]] for _, r, _ in whole for b in range(P * G)]
  assert any(len(set(v.tolist())) > 1 for v in versions)  # rows that several weights wrote


def test_turns_end_at_the_cap_by_steps(talked):
  _, _, _, history = talked
  for _, rollout, landed in history:
    last = rollout.turns.number_BxT.max(1)
    assert last.max() == 3 and set(rollout.reason_B.tolist()) <= {STOPPED, TRUNCATED}
    assert landed.metrics['environment/turns_over'] == (rollout.reason_B == STOPPED).sum() > 0
    assert landed.metrics['environment/turns'] == (last + 1).mean()
  stairs = dict(fn='stairs', starts=(0, 1), caps=(1, 3))
  _, _, short = run(made(lambda: Talks(), environment__horizon=stairs), 2)
  most = [rollout.turns.number_BxT.max() for _, rollout, _ in short]
  assert most == [0, 2]


def test_an_answer_without_room_behind_it_ends_the_row():
  context = made(lambda: Talks(), environment__turns=99)
  _, _, ((_, rollout, landed),) = run(context, 1)
  ended = rollout.reason_B == TRUNCATED
  assert ended.all() and rollout.length_B.max() <= T and landed.metrics['environment/no_room'] > 0
  last = rollout.turns.number_BxT[np.arange(P * G), rollout.length_B - 1]
  assert (last >= 0).all()  # no row ends with what nobody answers


def test_a_mark_ends_a_turn_as_the_end_token_does():
  """A tool's call, say; the next turn looks for its own mark, and not for what was said before it."""
  context = made(lambda: Talks(), ends=(0,), rollout__early_exit=dict(fn='text', text='e'))
  mark, end = context.models.policy.tokenizer.encode('e')[0], 0
  seen = []
  for index in range(3):
    _, _, ((_, rollout, _),) = run(context, 1, start=index)
    for b in range(P * G):
      tokens, number = rollout.tokens_BxT[b], rollout.turns.number_BxT[b]
      if tokens[0] == mark:  # a rule hears the first token of a row together with the second
        continue
      before = np.flatnonzero((number[:-1] >= 0) & (number[1:] < 0))
      before = before[before < rollout.length_B[b] - 1]
      seen += tokens[before].tolist()
      own = tokens[: rollout.length_B[b]][number[: rollout.length_B[b]] >= 0]
      assert set(np.flatnonzero(own[1:-1] == mark) + 1) <= set(
        np.flatnonzero(np.diff(number[number >= 0]))
      )
  assert mark in seen and set(seen) <= {mark, end}


class Fails:
  """Raises at the second turn of some rows."""

  def reset(self, row, seed):
    self.turn = 0

  def step(self, text):
    self.turn += 1
    if self.turn == 2 and len(text) % 2:
      raise KeyError('the tool is gone')
    return Result('ok', 1.0)


def test_an_environment_that_raises_is_counted_and_not_learned_from():
  """(f) By config.rewards.failed as a grader's failure: never a silent zero."""
  _, batch, ((_, rollout, landed),) = run(made(Fails), 1)
  failed = rollout.turns.outcome_B == rewards.ERROR
  assert 0 < failed.sum() < P * G
  assert landed.metrics['grade/errors'] == failed.sum() == landed.metrics['grade/dropped']
  assert (batch.rollout.length_B[failed] == 0).all() and (batch.rollout.length_B[~failed] > 0).all()
  assert [line['graded'] for line in landed.rollout_records if 'graded' in line] == [
    'error'
  ] * failed.sum()
  c = config(rewards__failed=dict(error='score', value=-1.0))
  context = made(Fails, rewards__failed=c.rewards.failed)
  _, scored, _ = run(context, 1)
  assert (scored.reward_B[failed] == -1).all() and (scored.rollout.length_B[failed] > 0).all()


def test_the_grader_reads_the_last_turn_and_the_environment_pays_beside_it():
  context = made(lambda: Talks(), environment__judge='rewards', environment__weight=0.25)
  _, batch, ((_, rollout, landed),) = run(context, 1)
  paid = rollout.turns.reward_BxT.sum(1)
  texts = [
    context.episodes.turn_texts(*x)[-1]
    for x in zip(rollout.tokens_BxT, rollout.turns.number_BxT, strict=True)
  ]
  right_B = np.array(list(map(right, texts)))
  np.testing.assert_allclose(batch.reward_B, right_B + 0.25 * paid)
  np.testing.assert_array_equal(batch.correct_B, right_B)
  assert paid.std() > 0 and 0 < right_B.mean() < 1, (texts, paid)
  np.testing.assert_allclose(landed.metrics['critic/score/environment'], paid.mean(), rtol=1e-6)


class Shows(Talks):
  def reset(self, row, seed):
    super().reset(row, seed)
    return f'!{seed % 10}'


def test_what_is_shown_first_belongs_to_the_prompt_and_fails_its_episodes_where_it_has_no_room():
  context = made(Shows, prompt_tokens=16)
  _, _, ((prompts, _, _),) = run(context, 1)
  for p in range(P):
    text = context.models.policy.tokenizer.decode(
      prompts.tokens_PxL[p, : prompts.length_P[p]].tolist()
    )
    question = context.tables.train.rows[prompts.index_P[p]].question
    assert text.startswith(question + '\n\n!') and len(text) == len(question) + 4
  context = made(Shows, prompt_tokens=9)
  _, _, ((_, rollout, landed),) = run(context, 1)
  assert landed.metrics['grade/errors'] == P * G and (rollout.turns.number_BxT.max(1) == 0).any()
  assert not context.episodes._failed  # an episode that is over is forgotten


def test_evaluation_plays_whole_episodes_and_pays_as_the_environment_does():
  context = made(lambda: Talks(turns=2), ends=tuple(range(0, 90, 2)), evaluation__prompts=4)
  context.episodes.begin_step(0)
  decode, scoring = (
    context.models.policy.tokenizer.decode,
    evaluate.Scoring(Pool(), episodes=context.episodes),
  )
  measure = evaluate.make_evaluator(context.spec, context.tables.held_out, decode, scoring, 0, {})
  metrics, rows, groups = measure(context.models.policy.params)
  assert measure(context.models.policy.params) == (metrics, rows, groups) and len(rows) == 4
  played = 0
  for line in rows:
    (said,), (score,) = line['output'], line['score']
    first, answered, _ = said.partition('<')
    played += bool(answered)
    # Told with its end token, the first turn is longer by one than what is paid where it is even; one that never ends
    # is paid nothing.
    assert score in (0, 1, 2) and (score == 0 if not answered else score > 0 or len(first) % 2 == 0)
  mean = np.mean([line['score'] for line in rows])
  assert metrics['val-core/all/acc/greedy'] == mean > 0 and played


def test_any_number_of_rounds_and_turns_is_played_by_two_compiled_programs(monkeypatch):
  """What a step compiles does not hang on how many calls its episodes take, or on how many turns they may."""
  compiled = []

  def kept(compile_half):
    return lambda spec: compiled.append(compile_half(spec)) or compiled[-1]

  for name in ('compile_update', 'compile_sample'):
    monkeypatch.setattr(programs, name, kept(getattr(programs, name)))
  stairs = dict(fn='stairs', starts=(0, 1, 2), caps=(1, 4, 2))
  _, _, history = run(made(Talks, environment__horizon=stairs), 3)
  assert len({landed.metrics['environment/calls'] for *_, landed in history}) == 3
  assert [half._cache_size() for half in compiled] == [1, 1]


@pytest.mark.parametrize(
  'changes, message',
  [
    (dict(mode='fused'), '--config.mode=split'),
    (dict(environment__turns=0), 'config.environment.turns=0'),
    (dict(environment__deadline_s=0.0), 'config.environment.deadline_s=0.0'),
    (dict(environment__cpu_s=0.0), 'config.environment.cpu_s=0.0 must be a positive number'),
    (dict(environment__worker_memory_mb=-1), 'config.environment.worker_memory_mb=-1'),
    (dict(environment__judge='me'), "config.environment.judge='me'"),
    (dict(environment__fn='chess'), 'choose one of: none, calculator'),
    (dict(environment__fn='math:nothing'), "'math' has no function"),
    (dict(environment__fn='math:sqrt'), 'fails'),
    (dict(environment__fn='search'), 'config.environment.path is missing'),
    (dict(environment__fn='walk'), "cannot begin with a row of the data (KeyError: 'size')"),
    (dict(environment__fn='none', environment__low=3), "not a setting of 'none'"),
    (dict(environment__low=9, environment__high=3), 'low=9 is above'),
    (
      dict(environment__fn='none', objective__credit_assignment=dict(fn='gigpo')),
      "'gigpo' does not go with config.environment.fn='none': it is defined by turns",
    ),
    (
      dict(
        environment__fn='none',
        objective__ratio=dict(fn='sequence'),
        optimizer__outer=dict(fn='last_turn_first'),
      ),
      'is defined by turns',
    ),
    (dict(replay__reuse=dict(fn='successes', count=1)), 'config.replay.reuse'),
    (dict(rollout__stop=dict(fn='rounds', count=2)), 'config.rollout.stop'),
    (dict(rollout__early_exit=dict(fn='repetition')), 'to text or none'),
    (dict(rewards__parts=(dict(fn='number'),)), 'replace those of config.rewards'),
    (dict(environment__horizon=dict(fn='stairs', starts=(0,), caps=())), 'starts=(0,)'),
  ],
)
def test_bad_settings_are_one_sentence(changes, message):
  with pytest.raises(UserError) as error:
    made(**changes)
  assert message in str(error.value)
