"""Tree rollouts equal those of plain Python, record the policy's log-probs, and without forks equal plain sampling."""

from __future__ import annotations

import collections
import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quick
import tree_reference as reference

from jaxrl_llm import step as steps
from jaxrl_llm.config import loading as configs
from jaxrl_llm.distributed import sharding
from jaxrl_llm.evaluation import evaluate
from jaxrl_llm.learner import empty_records
from jaxrl_llm.learner import state as train_state
from jaxrl_llm.learner.spec_from_config import make_spec
from jaxrl_llm.models import decoder
from jaxrl_llm.rollout import ring_decode, sampling, token_similarity, tree_decode, tree_rules
from jaxrl_llm.rollout.decode_records import DecodeInputs
from jaxrl_llm.runner import sft
from jaxrl_llm.types import (
  STOPPED,
  TRUNCATED,
  UNFINISHED,
  Batch,
  ModelConfig,
  Prompts,
  Row,
  UserError,
)

MODEL = ModelConfig(
  vocab=24, width=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp=48, max_tokens=64
)
P, G, L, T = 8, 4, 7, 13
B, END = P * G, (3, 11)
SPEC = ring_decode.DecodeSettings(G, T, 1.0, END, 'float32')

LATR = dict(absolute=0.1, relative=0.1, ages=(2, 3, 5), suffix=1.0, rouge=0.3, edit=0.0, limit=99)
ECHO = dict(
  entropy=1.8, entropy_low=1.0, rise=0.0, confidence=0.19, width=3, alpha=1.0, beta=1.0, depth=1,
  top_k=5, window=2, tail_window=3, floor=0.0, tail=0.0, drops=2, spike=9.0, rises=2, limit=99,
)  # fmt: skip
TREES = {'latr': LATR, 'echo': ECHO | dict(tail=0.165, floor=0.13, spike=0.3)}
# Events that must occur in a case, besides forks, for the case to test them.
CASES = {
  'latr, rouge': (LATR, ('at the first token', 'refused', 'drops', 'full', 'all done')),
  'latr, suffix': (LATR | dict(rouge=1.0, suffix=0.35), ('drops', 'descendants')),
  'latr, edit': (LATR | dict(rouge=1.0, edit=0.7), ('drops', 'descendants')),
  'latr, full soon': (LATR | dict(absolute=0.05, relative=0.3), ('full', 'refused')),
  'latr, limit': (LATR | dict(limit=4), ('limit', 'from the prompt')),
  'echo': (TREES['echo'], ('refused', 'drops', 'descendants', 'full', 'from the prompt')),
  'echo, floor': (ECHO | dict(floor=0.15), ('drops',)),
  'echo, tail': (ECHO | dict(tail=0.17), ('drops',)),
  'echo, spike': (ECHO | dict(spike=0.2, alpha=2.0), ('drops',)),
  'echo, deep': (ECHO | dict(depth=6, limit=9), ('limit', 'all done')),
}


def rules(**settings):
  return (tree_rules.echo if 'entropy' in settings else tree_rules.latr)(**settings)


def in_python(settings):
  if 'entropy' not in settings:
    return reference.Latr(**settings)
  return reference.Echo(**{('drops_' if k == 'drops' else k): v for k, v in settings.items()})


@pytest.fixture(scope='module')
def params():
  return jax.tree.map(lambda x: x * 1.5, decoder.init(MODEL, 0))


def make_prompts(order=range(P)):
  r = np.random.default_rng(0)
  length_P = r.integers(1, L + 1, P).astype(np.int32)
  tokens_PxL = r.integers(0, 24, (P, L)).astype(np.int32)
  index_P, born_P = np.arange(P, dtype=np.int32) * 7, np.full(P, 2, np.int32)
  prompts = Prompts(tokens_PxL, length_P, index_P, born_P, np.zeros(P, np.float32))
  return jax.tree.map(lambda x: x[np.array(order)], prompts)


# Thresholds are traced: cases that differ only by them share a compiled program.
NUMBERS = ('absolute', 'relative', 'alpha', 'depth', 'rise', 'floor', 'tail', 'spike')


@functools.cache
def compiled(settings, changes):
  spec = SPEC._replace(**dict(changes))

  def fn(params, prompts, share, cap, numbers):
    inputs = DecodeInputs(params, prompts, jax.random.key(1), 4, cap=cap)
    tree = rules(**dict(settings), **numbers)
    return tree_decode.generate(MODEL, spec, inputs, tree, share=share)

  return jax.jit(fn)


def run(params, settings, share=1.0, prompts=None, cap=T, **changes):
  fixed = tuple((k, v) for k, v in settings.items() if k not in NUMBERS)
  numbers = {k: v for k, v in settings.items() if k in NUMBERS}
  fn = compiled(fixed, tuple(changes.items()))
  rollout, iterations, grown = fn(params, prompts or make_prompts(), share, cap, numbers)
  assert fn._cache_size() == 1
  return jax.tree.map(np.asarray, rollout), int(iterations), jax.tree.map(np.asarray, grown)


def plain(params, **changes):
  spec = SPEC._replace(**changes)
  fn = jax.jit(
    lambda p, q: ring_decode.generate(MODEL, spec, DecodeInputs(p, q, jax.random.key(1), 4))[0]
  )
  return jax.tree.map(np.asarray, fn(params, make_prompts()))


@pytest.fixture(scope='module')
def sampled(params):
  return plain(params)


@pytest.fixture(scope='module')
def greedy(params):
  return plain(params, temperature=0.0, rollouts=1)


def assert_same(got, want, rows=slice(None)):
  """Log-probabilities equal up to rounding: a row that starts later lies in other columns of the ring."""
  for name, a, b in zip(got._fields, got, want, strict=True):
    if a is None and b is None:
      continue
    tolerance = 1e-5 if name == 'logp_BxT' else 0
    np.testing.assert_allclose(a[rows], b[rows], atol=tolerance, rtol=0, err_msg=name)


@pytest.fixture(scope='module')
def plain_trees(params):
  prompts = make_prompts()
  keys_B = sampling.row_keys(jax.random.key(1), prompts, G)
  return reference.Reference(MODEL, params, prompts, keys_B, SPEC)


@pytest.mark.parametrize('name', CASES)
def test_trees_equal_those_of_plain_python(params, plain_trees, name):
  settings, meant = CASES[name]
  plain_trees.events.clear()
  got, _, grown = run(params, settings)
  for p in range(P):
    for g, row in plain_trees.group(p, in_python(settings)).items():
      b, where = p * G + g, f'group {p}, row {g}'
      assert got.tokens_BxT[b, : got.length_B[b]].tolist() == row.tokens, where
      assert (grown.parent_B[b] - p * G, grown.born_B[b]) == (row.parent, row.born), where
  assert (grown.forks, grown.drops) == (plain_trees.events['forks'], plain_trees.events['drops'])
  for event in ('forks', *meant):
    assert plain_trees.events[event] > 0, f'{event} never happened: {plain_trees.events}'


@pytest.mark.parametrize('temperature', [1.0, 0.7])
@pytest.mark.parametrize('settings', TREES.values(), ids=TREES)
def test_recorded_log_prob_is_the_teacher_forced_one(params, settings, temperature):
  got, _, grown = run(params, settings, temperature=temperature)
  assert (grown.parent_B != np.arange(B)).sum() >= 4
  prompts, width = make_prompts(), L + T
  rows, start_B = np.zeros((B, width), np.int32), np.repeat(prompts.length_P, G)
  for b, (start, n) in enumerate(zip(start_B, got.length_B, strict=True)):
    rows[b, :start] = prompts.tokens_PxL[b // G, :start]
    rows[b, start : start + n] = got.tokens_BxT[b, :n]
  mask = np.arange(width)[None] < (start_B + got.length_B)[:, None]
  logits = jax.jit(lambda p: decoder.forward(MODEL, p, rows, mask))(params)
  logp = np.asarray(jax.nn.log_softmax(logits / temperature))
  for b, (start, n) in enumerate(zip(start_B, got.length_B, strict=True)):
    want = logp[b, np.arange(start - 1, start + n - 1), rows[b, start : start + n]]
    np.testing.assert_allclose(got.logp_BxT[b, :n], want, atol=1e-4)


@pytest.mark.parametrize('settings', TREES.values(), ids=TREES)
def test_a_child_equals_its_parent_up_to_the_fork_only(params, settings):
  got, _, grown = run(params, settings)
  children = np.flatnonzero(grown.parent_B != np.arange(B))
  assert len(children) >= 4 and grown.born_B[children].max() > 2
  for b in children:
    parent, born = grown.parent_B[b], grown.born_B[b]
    assert parent // G == b // G
    for x in (got.tokens_BxT, got.logp_BxT, got.version_BxT):
      np.testing.assert_array_equal(x[b, :born], x[parent, :born])
    assert got.tokens_BxT[b, born] != got.tokens_BxT[parent, born]


@pytest.mark.parametrize('settings', TREES.values(), ids=TREES)
def test_every_row_is_finished_and_zero_after_its_end(params, settings):
  got, _, _ = run(params, settings)
  for tokens, logp, n, reason in zip(*got[:4], strict=True):
    ends = np.isin(tokens[:n], END)
    assert n >= 1 and not ends[:-1].any() and ends[-1] == (reason == STOPPED)
    assert reason != UNFINISHED and (n == T or reason == STOPPED)
    assert (logp[:n] < 0).all() and not logp[n:].any() and not tokens[n:].any()
  real = np.arange(T)[None] < got.length_B[:, None]
  np.testing.assert_array_equal(got.version_BxT, np.where(real, 4, 0))


def test_latr_without_forks_is_one_greedy_row_and_ordinary_samples(params, sampled, greedy):
  got, iterations, grown = run(params, LATR | dict(absolute=1.0))
  assert grown.forks == 0 and iterations > T  # the others start when the first has finished
  root = np.arange(B) % G == 0
  assert_same(got, sampled, ~root)
  assert_same(jax.tree.map(lambda x: x[root], got), greedy)


def test_echo_without_forks_equals_the_ring_loop(params, sampled):
  got, _, grown = run(params, ECHO | dict(rise=99.0))
  assert grown.forks == 0 and grown.grown_P.all()
  assert_same(got, sampled)


def test_a_limit_of_tokens_ends_the_greedy_phase(params, greedy):
  got, _, _ = run(params, LATR | dict(absolute=1.0, limit=4))
  root = got.tokens_BxT[::G]
  np.testing.assert_array_equal(root[:, :4], greedy.tokens_BxT[:, :4])
  assert (root[:, 4:] != greedy.tokens_BxT[:, 4:]).any()


def test_share_is_traced_and_selects_groups(params, sampled):
  before = np.zeros(P, bool)
  for share in (0.0, 0.4, 0.7, 1.0):
    got, iterations, grown = run(params, LATR, share)
    assert_same(got, sampled, np.repeat(~grown.grown_P, G))
    assert (grown.grown_P >= before).all()
    if share == 0:
      assert not grown.grown_P.any() and iterations == sampled.length_B.max() - 1
    before = grown.grown_P
  assert before.all()
  many = make_prompts()._replace(index_P=np.arange(P), born_P=np.zeros(P, np.int32))
  assert 0 < run(params, LATR, 0.5, many)[2].grown_P.sum() < P


def test_share_follows_the_step_that_proposed_the_prompt():
  share = tree_rules.latr(starts=(0, 100, 200), shares=(1.0, 0.75, 0.0)).share
  got = share(jnp.array([0, 99, 100, 150, 200, 10**6]))
  np.testing.assert_allclose(got, [1, 1, 0.75, 0.75, 0, 0])


def test_order_of_prompts_changes_no_tree(params):
  got, _, grown = run(params, LATR, share=0.6)
  order = np.array([5, 2, 7, 0, 1, 6, 3, 4])
  rows = (order[:, None] * G + np.arange(G)).ravel()
  moved, _, other = run(params, LATR, share=0.6, prompts=make_prompts(order))
  np.testing.assert_array_equal(moved.tokens_BxT, got.tokens_BxT[rows])
  np.testing.assert_array_equal(other.parent_B % G, grown.parent_B[rows] % G)


def test_a_cap_truncates_all_rows_of_a_group_at_once(params):
  got, _, grown = run(params, LATR, cap=5)
  assert got.length_B.max() == 5 and grown.forks > 0
  assert (got.reason_B[got.length_B == 5] != UNFINISHED).all()
  assert (got.reason_B == TRUNCATED).any()


def test_similarity_equals_that_of_plain_python():
  r = np.random.default_rng(0)
  W, pairs = 9, []
  for n in range(1, W + 1):
    pairs += [r.integers(0, symbols, (2, n)).tolist() for symbols in (2, 3, 3, 8)]
  pairs += [([1, 2, 3, 4], [1, 2, 3, 4]), ([1, 2, 3], [4, 5, 6]), ([0, 0, 1], [0, 1, 2])]
  pad = lambda x: [-1] * (W - len(x)) + x  # noqa: E731
  a, b = (jnp.array([pad(pair[i]) for pair in pairs]) for i in (0, 1))
  for name in ('suffix_match', 'rouge_l', 'edit_distance'):
    got = jax.jit(jax.vmap(getattr(token_similarity, name)))(a, b)
    want = [getattr(reference, name)(*pair) for pair in pairs]
    np.testing.assert_allclose(got, want, atol=1e-6, err_msg=name)
    assert len(set(np.round(want, 3))) > 5


def test_caches_are_copied_only_in_the_branch_that_forks(params):
  """Instructions of the compiled program that create arrays of a cache's shape, per computation."""
  spec, r = SPEC._replace(max_tokens=128), rules(**LATR)
  inputs = lambda p, q: DecodeInputs(p, q, jax.random.key(0), 0)  # noqa: E731
  fn = jax.jit(lambda p, q: tree_decode.generate(MODEL, spec, inputs(p, q), r)[0])
  text = fn.lower(params, make_prompts()).compile(quick.AS_TRAINED).as_text()
  shape = re.escape(f'f32[{B},{MODEL.kv_heads},128,{MODEL.head_dim}]')
  counts, name = collections.defaultdict(collections.Counter), ''
  for line in text.splitlines():
    head = re.match(r'(ENTRY )?%([\w.-]+) .*\{$', line)
    name = ('ENTRY' if head[1] else head[2]) if head else name
    if op := re.search(rf'= {shape}\S* ([a-z-]+)\(', line):
      counts[name][op[1]] += 1
  caches, by_computation = 2 * MODEL.layers, dict(counts)
  # Before the loop: zeros, created once and copied.
  entry = counts.pop('ENTRY')
  assert entry['fusion'] + entry['broadcast'] + entry['copy'] <= caches + 1, by_computation
  copying = [k for k, ops in counts.items() if ops['copy']]
  assert len(copying) == 1, by_computation
  branches = re.findall(r'conditional\(.*branch_computations=\{%([\w.-]+), %([\w.-]+)\}', text)
  (pair,) = [pair for pair in branches if copying[0] in pair]
  other = pair[0] if copying[0] == pair[1] else pair[1]
  assert set(counts.pop(other)) == {'get-tuple-element'}, by_computation
  assert counts.pop(copying[0])['copy'] == caches
  rest = sum(counts.values(), collections.Counter())
  assert rest.pop('dynamic-update-slice') == caches, by_computation
  assert rest.pop('fusion') == caches, by_computation  # fusions wrap these updates
  rest.pop('broadcast', 0)  # the zeros in their fusion
  assert set(rest) <= {'parameter', 'get-tuple-element', 'bitcast'}, by_computation


def config(fn='latr', mesh=None, **changes):
  c = configs.default()
  c.prompts, c.rollouts, c.prompt_tokens, c.completion_tokens = P, G, L, T
  c.mesh.update(mesh or dict(fsdp=1))
  with c.ignore_type():
    c.rollout.tree = dict(fn=fn) | TREES.get(fn, {})
    for name, value in changes.items():
      c.rollout[name] = value
  return c


def step_spec(count=1, **changes):
  c = config(**changes)
  return make_spec(c, MODEL, END, sharding.make_mesh(c.mesh, jax.devices()[:count]))


@pytest.mark.parametrize(
  'fn, lockstep, mesh', [('latr', True, (2, 2, 2)), ('echo', False, (8, 1, 1))]
)
def test_one_device_and_eight_grow_the_same_trees(params, fn, lockstep, mesh):
  def grow(step_spec):
    state = train_state.init_state(step_spec, params)
    fn = jax.jit(
      lambda p: steps.generate(step_spec, train_state.sampling_state(p), make_prompts())[:2]
    )
    return jax.tree.map(np.asarray, fn(state.params))

  one, metrics = grow(step_spec(fn=fn))
  mesh = dict(zip(('data', 'fsdp', 'tensor'), mesh, strict=True))
  many, metrics8 = grow(step_spec(8, fn=fn, mesh=mesh, lockstep=lockstep))
  np.testing.assert_array_equal(one.tokens_BxT, many.tokens_BxT)
  np.testing.assert_allclose(one.logp_BxT, many.logp_BxT, atol=1e-4)
  assert metrics8 == metrics and metrics['generate/tree_forks'] > metrics['generate/tree_drops'] > 0
  assert metrics['generate/tree_groups'] == P > 0 and metrics['generate/tree_rows'] > 0


def test_a_step_learns_from_trees_and_samples_new_ones(params):
  p = step_spec()
  state, fn, batch = (
    train_state.init_state(p, params),
    steps.compile_step(p),
    empty_records.empty_batch(p),
  )
  for _ in range(3):
    state, rollout, metrics = fn(state, batch, make_prompts(), None, None, np.int32(T))
    rollout = jax.tree.map(np.asarray, rollout)
    reward_B = (rollout.length_B % 2).astype(np.float32)
    batch = Batch(make_prompts(), rollout, reward_B, reward_B)
    assert metrics['training/rollout_probs_diff_max'] < 1e-4
    assert all(np.isfinite(float(v)) for v in metrics.values())
  assert int(state.step) == 2 and fn._cache_size() == 1


def test_without_trees_the_step_has_no_tree_metrics(params):
  p = step_spec(fn='none')
  assert p.rollout.tree is None
  state = train_state.init_state(p, params)
  metrics = jax.eval_shape(
    lambda q: steps.generate(p, train_state.sampling_state(q), make_prompts())[1], state.params
  )
  assert not [name for name in metrics if 'tree' in name]


def test_latr_compares_children_at_its_ages_while_they_and_their_parents_run():
  rules = tree_rules.latr(ages=(2, 4))
  # parent, born, length, runs: a root, a finished root, then children.
  rows = [(0, 0, 5, True), (1, 0, 3, False)]
  rows += [(0, 3, 5, True), (1, 3, 5, True), (0, 3, 5, False), (0, 2, 5, True), (0, 1, 5, True)]
  parent_B, born_B, length_B, running_B = (jnp.array(x) for x in zip(*rows, strict=True))
  branches = tree_rules.BranchState(jnp.zeros((7, 9), int), length_B, parent_B, born_B, running_B)
  assert rules.due(branches).tolist() == [False, False, True, False, False, False, True]
  assert rules.pending(branches).tolist() == [False, False, True, False, False, True, False]


def test_evaluation_grows_no_trees(params):
  """Evaluation samples the same completions as without trees: one greedy, some sampled."""

  class Table:
    rows = tuple(Row(str(i), 'q', (), 'a', 's', {}) for i in range(P))
    tokens = tuple(np.zeros(L, np.int32) for _ in range(P))

    def prompts(self, index, born):
      return make_prompts()._replace(born_P=np.full(P, born, np.int32))

  class Pool:
    def score(self, rows, texts):
      return types.SimpleNamespace(reward_B=np.zeros(len(texts), np.float32))

  plain = dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
  completions = [
    evaluate.make_evaluator(step_spec(fn=fn), Table(), str, evaluate.Scoring(Pool()), 2, plain)(
      params
    )[1]
    for fn in ('latr', 'none')
  ]
  assert completions[0] == completions[1] and len(completions[0]) == 2 * P


def test_a_supervised_warm_start_needs_no_rows_to_fork_into(params, monkeypatch):
  c = config()
  c.sft.steps, c.sft.prompts = 1, P
  p = make_spec(c, MODEL, END, sharding.make_mesh(c.mesh, jax.devices()[:1]))
  answers = Batch(
    make_prompts(),
    jax.tree.map(lambda x: x[:P], empty_records.empty_rollout(p)),
    np.ones(P, np.float32),
    np.ones(P, np.float32),
  )
  monkeypatch.setattr(sft, 'batch', lambda *_: answers)
  losses = []
  sft.run(c, p, train_state.init_state(p, params), range(P), None, losses.append)
  assert len(losses) == 1


@pytest.mark.parametrize(
  'changes, why',
  [
    (dict(slots=8), "tree.fn='latr' needs a slot for every row: set config.rollout.slots=8 to 0"),
    (dict(stop=dict(fn='groups')), "does not go with config.rollout.stop.fn='groups'"),
    (dict(draft=dict(fn='coupled')), "does not go with config.rollout.draft.fn='coupled'"),
    (dict(tree=dict(fn='latr', ages=())), r'tree.ages=\(\) must name at least one age'),
    (dict(tree=dict(fn='latr', ages=5)), r'tree.ages=5 of .latr. must be a list of whole numbers'),
    (dict(tree=dict(fn='latr', limit=0)), 'tree.limit=0 must be at least 1 token'),
    (dict(tree=dict(fn='echo', starts=(0, 5))), r'tree.starts=\(0, 5\) must rise, with one of'),
    (dict(tree=dict(fn='echo', shares=(1.5,))), r'tree.shares=\(1.5,\) must each be from 0 to 1'),
    (dict(tree=dict(fn='echo', width=1)), 'width=1 must be at least 2'),
    (dict(tree=dict(fn='lart')), "tree.fn='lart' is unknown; choose one of: echo, latr, none"),
    (dict(tree=dict(fn='latr', suffixes=0.1)), "tree.suffixes=0.1 is not a setting of 'latr'"),
  ],
)
def test_what_does_not_go_with_trees_is_told(changes, why):
  with pytest.raises(UserError, match=why):
    step_spec(**changes)


def test_trees_accept_no_unfinished_rows(params):
  p = step_spec()
  with pytest.raises(UserError, match='give no begun and no draft'):
    steps.generate(
      p, train_state.sampling_state(params), make_prompts(), begun=empty_records.empty_rollout(p)
    )
