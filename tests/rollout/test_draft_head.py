"""Draft head: it changes no token, learns in the update, and drafts only where that pays."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_job

from jaxrl_llm import step as steps
from jaxrl_llm.config import loading as configs
from jaxrl_llm.distributed import sharding
from jaxrl_llm.learner import compile as programs
from jaxrl_llm.learner import empty_records
from jaxrl_llm.learner import state as train_state
from jaxrl_llm.learner.spec_from_config import make_spec
from jaxrl_llm.models import decoder
from jaxrl_llm.rollout import draft_decode, draft_head, sampling, slot_loop
from jaxrl_llm.rollout.decode_records import DecodeInputs
from jaxrl_llm.types import ModelConfig, Prompts, UserError

P, G, L, T, V, K = 6, 4, 4, 20, 12, 3
MODEL = ModelConfig(
  vocab=V, width=16, layers=2, heads=2, kv_heads=1, head_dim=8, mlp=24, max_tokens=64
)
HEAD = dict(fn='eagle', tokens=K, learning_rate=1e-2, clip_norm=10.0)
STEPS = 60


def spec(devices=1, slots=0, rate=1e-9, **head):
  """Weights that hardly move, unless `rate` says so; head=None is the plain loop."""
  c = configs.default()
  c.prompts, c.rollouts, c.prompt_tokens, c.completion_tokens = P, G, L, T
  c.optimizer.learning_rate, c.rollout.slots, c.temperature = rate, slots, 0.7
  c.mesh.data, c.mesh.fsdp = (2, 1) if devices == 2 else (1, 1)
  with c.ignore_type():
    c.rollout.draft_head = dict(fn='none') if head.get('fn') == 'none' else HEAD | head
  return make_spec(c, MODEL, (3, 7), sharding.make_mesh(c.mesh, jax.devices()[:devices]))


def params():
  return jax.tree.map(lambda x: x * 1.5, decoder.init(MODEL, 0))


def alike():
  """A policy that has the same hidden state behind any text: all tokens are embedded alike."""
  weights = params()
  table = weights['embed']['embedding']
  weights['embed']['embedding'] = jnp.broadcast_to(table[:1], table.shape) * 1.0
  return weights


def make_prompts(born=0):
  r = np.random.default_rng(0)
  index_P = np.arange(P, dtype=np.int32)
  tokens_PxL = r.integers(0, V, (P, L)).astype(np.int32)
  return Prompts(
    tokens_PxL, index_P % L + 1, index_P, np.full(P, born, np.int32), np.zeros(P, np.float32)
  )


@functools.cache
def sampler(**changes):
  made = spec(**changes)
  return jax.jit(functools.partial(steps.generate, made))


def sample(state, born=0, **changes):
  rollout, metrics, _ = sampler(**changes)(state, make_prompts(born))
  return jax.tree.map(np.asarray, rollout), {k: float(v) for k, v in metrics.items()}


def train(made, count, head=None):
  """(state, metrics, batch that was learned) of each step; from the state of a head, or a new one."""
  call, batch = steps.compile_step(made), empty_records.empty_batch(made)
  state, history = train_state.init_state(made, params()), []
  if head is not None:
    state = state._replace(rollout_head=jax.tree.map(jnp.array, head))
  for index in range(count):
    prompts, learned = make_prompts(index), batch
    state, rollout, metrics = call(state, batch, prompts, None, None, np.int32(T))
    rollout = jax.tree.map(np.asarray, rollout)
    right_B = (np.arange(P * G) % 2).astype(np.float32)
    batch = batch._replace(prompts=prompts, rollout=rollout, reward_B=right_B, correct_B=right_B)
    history.append((jax.device_get(state), jax.device_get(metrics), learned))
  return history


@pytest.fixture(scope='module')
def learned():
  return train(spec(), STEPS)


def assert_same_tokens(got, want):
  for name in ('tokens_BxT', 'length_B', 'reason_B'):
    np.testing.assert_array_equal(getattr(got, name), getattr(want, name))
  np.testing.assert_allclose(got.logp_BxT, want.logp_BxT, atol=1e-4)


@pytest.mark.parametrize('slots', [0, 5])
@pytest.mark.parametrize('is_trained', [False, True])
def test_drafts_change_no_token(learned, slots, is_trained):
  state = train_state.init_state(spec(), params())
  if is_trained:
    state = state._replace(rollout_head=learned[-1][0].rollout_head)
  want, _ = sample(state._replace(rollout_head=None), born=99, fn='none')
  got, metrics = sample(state, born=99, slots=slots, cost=0.0)
  assert_same_tokens(got, want)
  assert metrics['generate/draft_head_offered'] > 0


def test_a_head_that_knows_the_hidden_states_has_all_its_drafts_accepted():
  """At the start a head predicts no change, which is right where all texts look alike."""
  state = train_state.init_state(spec(), alike())
  plain, before = sample(state._replace(rollout_head=None), fn='none')
  got, metrics = sample(state, cost=0.0)
  assert_same_tokens(got, plain)
  # Each iteration samples 1 + K tokens of a row, but for its last one.
  turns_B = -(-(got.length_B - 1) // (K + 1))
  assert metrics['generate/draft_head_turns'] == turns_B.sum()
  assert metrics['generate/draft_head_offered'] == K * turns_B.sum()
  assert metrics['generate/draft_head_kept'] == (got.length_B - 1).sum() - turns_B.sum()
  assert metrics['generate/rounds'] < before['generate/rounds'] / 2


@pytest.mark.parametrize('slots', [0, 5])
def test_a_slot_has_the_hidden_state_that_predicted_its_token(slots):
  """A drafter that has the rows themselves drafts only where that state draws the token again."""
  state, made = train_state.init_state(spec(), params()), spec(slots=slots)
  want, _ = sample(state._replace(rollout_head=None), fn='none')
  token_BxT = jnp.asarray(want.tokens_BxT)

  def propose(constants, rollout, slots):
    logits_SxV = decoder.head(MODEL, constants.params, slots.hidden_SxD)
    again_S, _ = slot_loop.sample_rows(constants, logits_SxV, slots.row_S, slots.index_SxQ[:, 0])
    right_SxQ = token_BxT[slots.row_S[:, None], jnp.minimum(slots.index_SxQ, T - 1)]
    return jnp.where((again_S == right_SxQ[:, 0])[:, None], right_SxQ, -1)

  drafter = draft_decode.Drafter(K, propose, reads_hidden=True)
  inputs = DecodeInputs(params(), make_prompts(), jax.random.key(0), 0)
  generate = functools.partial(draft_decode.generate, MODEL, made.rollout.decode, inputs, drafter)
  got, _, counts = jax.jit(generate)()
  assert_same_tokens(got, want)
  assert counts.turns == (-(-(want.length_B - 1) // (K + 1))).sum()


def logits(weights, tokens):
  """Hidden states and logits [L + T, V] of a text; those behind its end mean nothing."""
  padded = np.pad(tokens, (0, L + T - len(tokens)))  # one shape, so that one program is compiled
  tokens_1xS, mask_1xS = jnp.asarray(padded)[None], jnp.ones((1, L + T), bool)
  hidden, _, _ = decoder.apply(
    MODEL, weights, tokens_1xS, jnp.arange(L + T)[None], jnp.tril(mask_1xS[:, :, None] & mask_1xS[:, None])
  )  # fmt: skip
  return hidden[0], decoder.head(MODEL, weights, hidden, 'float32')[0]


def next_hidden(head, h, embedded):
  unit = lambda x: x / jnp.sqrt((x**2).mean() + 1e-6)  # noqa: E731
  inputs = jnp.concatenate([unit(h), unit(embedded)])
  return h + jax.nn.silu(inputs @ head['w1'] + head['b1']) @ head['w2']


def drafts(head, policy, batch):
  """(draft, k, token, log-probs of the policy and of the draft [V]) of every draft token, k from 1, draft by draft."""
  found = []
  for p in range(P):  # the first rollout of each prompt
    length = int(batch.prompts.length_P[p])
    own = batch.rollout.tokens_BxT[p * G, : batch.rollout.length_B[p * G]]
    hidden, right = logits(policy, np.concatenate([batch.prompts.tokens_PxL[p, :length], own]))
    for start in range(len(own) - 1):  # a draft begins behind own[start]
      h = hidden[length - 1 + start]
      for at in range(start + 1, min(start + K, len(own) - 1) + 1):
        h = next_hidden(head, h, policy['embed']['embedding'][own[at - 1]])
        both = right[length - 1 + at], decoder.head(MODEL, policy, h[None], 'float32')[0]
        policy_and_draft = (jax.nn.log_softmax(x / 0.7) for x in both)
        found.append(((p, start), at - start, own[at], *policy_and_draft))
  return found


def turns_of_plain_loop(head, policy, prompts, rollout):
  """The turns in which drafts of K tokens sample the rollout's rows behind their first tokens, one by one."""
  keys_B = sampling.row_keys(jax.random.key(0), prompts, G)
  turns = 0
  for b in range(P * G):
    length, start = int(prompts.length_P[b // G]), 0
    own = rollout.tokens_BxT[b, : rollout.length_B[b]]
    hidden, _ = logits(policy, np.concatenate([prompts.tokens_PxL[b // G, :length], own]))
    while start < len(own) - 1:
      h, token, turns = hidden[length - 1 + start], own[start], turns + 1
      for _ in range(K):
        start += 1
        h = next_hidden(head, h, policy['embed']['embedding'][token])
        uniform_1 = sampling.uniforms(keys_B[b : b + 1], start)
        drawn_1, _ = sampling.sample(decoder.head(MODEL, policy, h[None]), uniform_1, 0.7)
        token = int(drawn_1[0])
        if start >= len(own) or token != own[start]:
          break  # the next turn begins at the row's own token
      else:
        start += 1
  return turns


def expected_loss(head, policy, batch):
  """Σ_k 0.8^(k − 1) · the mean of KL(policy ‖ draft token k)."""
  kl = lambda k: jnp.stack(  # noqa: E731
    [(jnp.exp(p) * (p - q)).sum() for _, j, _, p, q in drafts(head, policy, batch) if j == k]
  )
  return sum(0.8**k * kl(k + 1).mean() for k in range(K))


def expected_metrics(head, policy, batch):
  """Mean KL of first draft tokens, the number of accepted ones per turn, and the share of first ones accepted."""
  kl, shares = (
    [],
    {},
  )  # draft → the probabilities that its tokens are accepted, each behind those before it
  for draft, k, token, p, q in drafts(head, policy, batch):
    kl += [float((jnp.exp(p) * (p - q)).sum())] * (k == 1)
    (a, b), (c, d) = (
      np.cumsum(np.concatenate([[0], np.exp(np.float64(x))]))[token : token + 2] for x in (p, q)
    )
    shares.setdefault(draft, []).append(max(min(b, d) - max(a, c), 0) / (b - a))

  @functools.cache
  def turns(p, start):
    """The mean number of turns until the end of the row, from one that begins at token `start` on."""
    if (p, start) not in shares:
      return 0
    count, reached = 1, 1.0
    for at, share in enumerate(shares[p, start], start + 1):
      count, reached = count + reached * (1 - share) * turns(p, at), reached * share
    return count + reached * turns(p, start + len(shares[p, start]) + 1)

  accepted = len(kl) / sum(turns(p, 0) for p in range(P)) - 1
  return np.mean(kl), accepted, np.mean([x[0] for x in shares.values()])


def test_a_step_is_one_of_adam_on_the_loss_of_whole_rows():
  """The policy is that which samples next."""
  made = spec(rate=1e-2)
  (before, _, _), (state, metrics, batch) = train(made, 2)
  head = before.rollout_head
  kl, accepted, first = expected_metrics(head.params, state.params, batch)
  assert metrics['draft_head/kl'] == pytest.approx(kl, rel=1e-4)
  assert metrics['draft_head/accepted'] == pytest.approx(accepted, rel=1e-4)
  assert metrics['draft_head/first_accepted'] == pytest.approx(first, rel=1e-4)
  assert state.rollout_head.accepted == pytest.approx(0.1 * accepted, rel=1e-4)
  grads = jax.grad(expected_loss)(head.params, state.params, batch)
  got = jax.tree.map(lambda m: m / (1 - 0.9), state.rollout_head.opt_state[1][0].mu)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got, grads)


def test_a_trained_head_takes_the_turns_of_a_plain_loop(learned):
  head = learned[-1][0].rollout_head
  state = train_state.init_state(spec(), params())._replace(rollout_head=head)
  got, metrics = sample(state, born=99, slots=5, cost=0.0)
  want = turns_of_plain_loop(head.params, params(), make_prompts(99), got)
  assert metrics['generate/draft_head_turns'] == want
  assert metrics['generate/draft_head_kept'] == (got.length_B - 1).sum() - want


def test_as_many_turns_are_expected_as_slots_take(learned):
  """Of rollouts by a policy and a head that hardly move; also of those that end within a draft."""
  made = spec(cost=0.0, learning_rate=1e-9, rollouts=G)
  history = train(made, 40, learned[-1][0].rollout_head)
  tokens = turns = expected = 0
  for (_, sampled, _), (_, learning, batch) in itertools.pairwise(history):
    count = np.maximum(batch.rollout.length_B - 1, 0).sum()
    tokens += count
    turns += sampled['generate/draft_head_turns']
    expected += count / (1 + learning['draft_head/accepted'])
  assert tokens / turns > 1.5
  assert turns == pytest.approx(expected, rel=0.02)


def test_the_policy_learns_what_it_learns_without_a_head():
  (_, _, _), (with_head, _, _) = train(spec(rate=1e-2), 2)
  (_, _, _), (without, _, _) = train(spec(rate=1e-2, fn='none'), 2)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), with_head.params, without.params
  )


def test_the_head_learns_and_starts_to_draft_where_that_pays(learned):
  first, last = learned[1][1], learned[-1][1]
  assert last['draft_head/kl'] < 0.7 * first['draft_head/kl']
  state = train_state.init_state(spec(), params())
  for accepted, proposes in ((0.4, False), (0.6, True)):
    head = learned[-1][0].rollout_head._replace(accepted=np.float32(accepted))
    _, metrics = sample(state._replace(rollout_head=head), born=99)
    assert (metrics['generate/draft_head_offered'] > 0) == proposes, 'the default cost is 1.5'


def test_a_new_head_has_the_width_and_the_noise_that_are_set():
  heads = [draft_head.eagle(width=w).init(8, seed).params for w, seed in ((0, 0), (5, 0), (5, 1))]
  assert [x['w1'].shape for x in heads] == [(16, 16), (16, 5), (16, 5)]
  assert (heads[1]['w1'] != heads[2]['w1']).all()


def test_a_gradient_that_is_not_finite_changes_no_state():
  head = draft_head.eagle(tokens=K)
  state, count_K = head.init(8, 0), jnp.full(K, 9.0)
  sums = draft_head.DraftSums(count_K, jnp.float32(4), jnp.float32(5))
  grads = jax.tree.map(jnp.ones_like, state.params)
  for broken in (jnp.nan, jnp.inf):
    after, _ = head.learn(state, grads | dict(b1=grads['b1'] * broken), sums, count_K)
    jax.tree.map(np.testing.assert_array_equal, after, state)
  after, _ = head.learn(state, grads, sums, count_K)
  assert (after.params['w2'] != 0).all() and after.accepted == pytest.approx(0.1 * (9 / 5 - 1))


def test_agreement_is_that_of_two_draws_by_one_uniform():
  r = np.random.default_rng(0)
  p, q = (np.log(r.dirichlet(np.ones(5), 7)) for _ in range(2))
  uniform = (np.arange(200_000) + 0.5) / 200_000
  for row in range(7):
    drawn = [np.searchsorted(np.cumsum(np.exp(x[row])), uniform) for x in (p, q)]
    for token in range(5):
      mine = drawn[0] == token
      want = (drawn[1][mine] == token).mean()
      got = draft_head._agreement(p[row], q[row], np.int32(token))
      assert got == pytest.approx(want, abs=1e-3)


def test_rows_without_tokens_and_other_rollouts_do_not_count():
  made = spec()
  state, _, batch = train(made, 2)[-1]
  update = programs.compile_update(made)
  length_B = np.array(batch.rollout.length_B)
  length_B[np.arange(P * G) % G > 0] = 0
  length_B[:G] = 0

  def learned(batch):
    return jax.device_get(update(jax.tree.map(np.array, state), batch)[0].rollout_head.params)

  fewer = batch._replace(rollout=batch.rollout._replace(length_B=length_B))
  nonsense = np.where(np.arange(T)[None] < length_B[:, None], batch.rollout.tokens_BxT, 5)
  other = fewer._replace(rollout=fewer.rollout._replace(tokens_BxT=nonsense.astype(np.int32)))
  jax.tree.map(np.testing.assert_array_equal, learned(other), learned(fewer))
  nothing = batch._replace(rollout=batch.rollout._replace(length_B=0 * length_B))
  jax.tree.map(
    np.testing.assert_array_equal, learned(nothing), jax.device_get(state.rollout_head.params)
  )


def test_two_devices_train_the_head_of_one(learned):
  for one, two in zip(learned, train(spec(devices=2), 4), strict=False):
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4),
      one[0].rollout_head,
      two[0].rollout_head,
    )
    assert two[1]['draft_head/kl'] == pytest.approx(one[1]['draft_head/kl'], rel=1e-3, abs=1e-6)


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path):
  """With a lag, so that the pending step depends on the head, which always drafts."""
  config = tiny_job.config_file(
    tmp_path,
    **tiny_job.UNTAUGHT,
    steps=6,
    mode='lag',
    checkpoint=dict(every=3, keep=2),
    rollout=dict(slots=4, draft_head=dict(fn='eagle', tokens=2, cost=0.0, learning_rate=1e-2)),
    evaluation=dict(every=0, prompts=8, samples=0),
  )
  tiny_job.finish(tiny_job.start(config, tmp_path / 'whole'))
  tiny_job.finish(tiny_job.start(config, tmp_path / 'run', '--config.steps=3'))
  assert 'resuming at step 3' in tiny_job.finish(tiny_job.start(config, tmp_path / 'run'))
  rows = tiny_job.rows(tmp_path / 'whole')
  assert tiny_job.rows(tmp_path / 'run') == rows
  assert rows[-1]['draft_head/kl'] > 0 and rows[-1]['generate/draft_head_offered'] > 0


@pytest.mark.parametrize(
  'settings, message',
  [
    (dict(tokens=0), 'tokens=0 must be at least 1'),
    (dict(rollouts=0), 'rollouts=0 must be at least 1'),
    (dict(width=-1), 'width=-1 must be at least 0'),
    (dict(learning_rate=0.0), 'learning_rate=0.0 must be finite and above 0'),
    (dict(cost=-1.0), 'cost=-1.0 must be finite and at least 0'),
    (dict(memory=1.0), 'memory=1.0 must be from 0 up to but not including 1'),
  ],
)
def test_invalid_settings_raise_user_errors(settings, message):
  with pytest.raises(UserError, match=message):
    draft_head.eagle(**settings)


@pytest.mark.parametrize(
  'settings, message',
  [
    (dict(tokens=T), f'draft_head.tokens={T} must be below config.completion_tokens={T}'),
    (dict(rollouts=G + 1), f'draft_head.rollouts={G + 1} must be at most config.rollouts={G}'),
  ],
)
def test_settings_beyond_the_job_raise_user_errors(settings, message):
  with pytest.raises(UserError, match=message):
    spec(**settings)
