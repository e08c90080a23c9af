"""LoRA: the adapter's gradient, what a step changes and what it leaves, one device and eight, stopped and resumed."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_job
from test_step import (
  MODEL,
  G,
  P,
  T,
  assert_close,
  config,
  graded,
  gradient,
  gradient_of,
  spec,
  train,
)

from jaxrl_llm import step as steps
from jaxrl_llm import train as runs
from jaxrl_llm.config import loading as configs
from jaxrl_llm.config.schema import LoraConfig
from jaxrl_llm.distributed import sharding
from jaxrl_llm.learner import compile as programs
from jaxrl_llm.learner import empty_records, leverage, lora, microbatch
from jaxrl_llm.learner import state as train_state
from jaxrl_llm.learner.spec_from_config import make_spec
from jaxrl_llm.models import decoder
from jaxrl_llm.runner import validate
from jaxrl_llm.types import UserError
from tests.learner.test_step_methods import chosen, off_policy

ALL = '(q|k|v|o|gate|up|down)$'
ON = dict(rank=3, alpha=6.0, targets=ALL)  # counts alpha / rank = 2


def adapted(**changes):
  return spec(lora=changes.pop('lora', ON), **changes)


def drawn(seed=0, settings=None):
  """An adapter whose B is not 0, as after some training."""
  settings = settings or adapted().model.lora
  adapter = lora.init(settings, decoder.init(MODEL, 0), seed)
  r = np.random.default_rng(seed)
  return jax.tree.map(lambda x: jnp.asarray(x + 0.1 * r.normal(size=x.shape), jnp.float32), adapter)


def logits(params, **keywords):
  r = np.random.default_rng(5)
  tokens, mask = r.integers(0, MODEL.vocab, (3, 7)), np.ones((3, 7), bool)
  mask[1, :2] = False
  return np.asarray(jax.jit(lambda p: decoder.forward(MODEL, p, tokens, mask, **keywords))(params))


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_a_new_adapter_changes_no_bit(dtype):
  base = decoder.init(MODEL, 0)
  adapter = lora.init(adapted().model.lora, base, 0)
  want = logits(base, dtype=dtype)
  np.testing.assert_array_equal(logits(lora.join(base, adapter, 6.0), dtype=dtype), want)
  np.testing.assert_array_equal(logits(lora.merge(base, adapter, 6.0), dtype=dtype), want)
  assert (logits(lora.join(base, drawn(), 6.0), dtype=dtype) != want).any()


def test_a_new_adapter_has_unit_outputs_and_is_keyed_by_seed_and_path():
  base = decoder.init(MODEL, 0)
  wide = lora.LoraSettings(32, 1.0, ('down', 'q', 'up'))
  layers = lora.init(wide, base, 0)['layers']
  for i, name, fan in ((0, 'q', 32), (1, 'up', 32), (1, 'down', 48)):
    a, b = layers[i][name]['a'], layers[i][name]['b']
    assert a.shape == (fan, 32) and b.shape == (32, base['layers'][i][name]['kernel'].shape[1])
    np.testing.assert_allclose(a.std(), fan**-0.5, rtol=0.1)
    assert not b.any()
  alone = lora.init(wide._replace(names=('up',)), base, 0)['layers']
  np.testing.assert_array_equal(alone[1]['up']['a'], layers[1]['up']['a'])
  assert (layers[0]['q']['a'] != layers[1]['q']['a']).any()
  assert (lora.init(wide, base, 1)['layers'][0]['q']['a'] != layers[0]['q']['a']).any()


def test_merged_weights_equal_the_base_and_adapter_joined():
  base, adapter = decoder.init(MODEL, 0), drawn()
  merged = lora.merge(base, adapter, 6.0)
  for i, layer in adapter['layers'].items():
    for name, ab in layer.items():
      want = np.float64(base['layers'][i][name]['kernel']) + 2.0 * np.float64(ab['a']) @ ab['b']
      np.testing.assert_allclose(merged['layers'][i][name]['kernel'], want, atol=1e-6)
  for tree in (base, merged):  # all else is the base's own
    for layer in tree['layers'].values():
      for name in ALL.strip('()$').split('|'):
        layer[name] = {k: v for k, v in layer[name].items() if k != 'kernel'}
  assert jax.tree.structure(base) == jax.tree.structure(merged)
  jax.tree.map(np.testing.assert_array_equal, base, merged)


def test_sampling_from_merged_weights_equals_sampling_from_joined_ones():
  base, adapter = decoder.init(MODEL, 0), drawn()
  p, plain = adapted(), spec()
  state = train_state.init_state(p, base)._replace(params=adapter)
  batch = graded(plain, lora.merge(base, adapter, 6.0))
  rollout = jax.jit(lambda s: steps.generate(p, s, batch.prompts)[0])(state)
  np.testing.assert_array_equal(rollout.tokens_BxT, batch.rollout.tokens_BxT)
  beside = microbatch.policy_weights(p, state.base, state.params)
  tokens_BxT = jnp.asarray(rollout.tokens_BxT)
  again = jax.jit(lambda w: microbatch.log_probs(p, w, batch.prompts, tokens_BxT)[0])(beside)
  real = np.arange(T)[None] < np.asarray(rollout.length_B)[:, None]
  np.testing.assert_allclose(again[real], np.asarray(rollout.logp_BxT)[real], atol=2e-5)
  # And its step learns from what it sampled, exactly on its policy.
  *_, (_, metrics) = train(adapted(), 4)[0]
  assert metrics['training/rollout_probs_diff_max'] < 1e-5 and metrics['actor/update_norm'] > 0


def test_in_bfloat16_tokens_are_sampled_from_the_policy_that_is_trained():
  """A small change of a kernel is less than its last digit: merged it would be another policy, or none."""
  base = decoder.init(MODEL, 0)
  drawn_b = np.random.default_rng(0).normal
  adapter = jax.tree.map(
    lambda x: x if x.any() else np.float32(3e-3 * drawn_b(size=x.shape)),
    lora.init(adapted().model.lora, base, 0),
  )
  p = adapted(dtype='bfloat16')
  state = train_state.init_state(p, base)._replace(params=adapter)
  prompts = graded(spec(), base).prompts
  weights, merged = train_state.sampling_weights(p, state), train_state.merged_weights(p, state)
  placed = train_state.abstract_sampling_weights(p)
  assert jax.tree.structure(placed) == jax.tree.structure(weights) != jax.tree.structure(merged)

  def gap(state):
    rollout = jax.jit(lambda s: steps.generate(p, s, prompts)[0])(state)
    beside = microbatch.policy_weights(p, train_state.init_state(p, base).base, adapter)
    tokens_BxT = jnp.asarray(rollout.tokens_BxT)
    again = jax.jit(lambda w: microbatch.log_probs(p, w, prompts, tokens_BxT)[0])(beside)
    real = np.arange(T)[None] < np.asarray(rollout.length_B)[:, None]
    return np.abs(again - rollout.logp_BxT)[real].mean(), np.asarray(rollout.logp_BxT)

  (near, logp), (same, evaluated), (far, _) = map(
    gap, (state, train_state.sampling_state(weights), train_state.sampling_state(merged))
  )
  np.testing.assert_array_equal(logp, evaluated)
  assert same == near < far / 2


@pytest.mark.parametrize('remat', [False, True])
def test_the_gradient_is_the_chain_rule_of_that_of_the_weights(remat):
  """W + s·A·B: ∂A = s·∂W·Bᵀ and ∂B = s·Aᵀ·∂W, with ∂W from the plain program at the merged weights."""
  base, adapter = decoder.init(MODEL, 0), drawn()
  p, plain = adapted(remat=remat), spec(learner=dict(remat=remat))
  merged = lora.merge(base, adapter, 6.0)
  batch = graded(plain, merged)
  dense = gradient(plain, batch, merged)['layers']

  state = train_state.init_state(p, base, adapter=adapter)
  got = gradient_of(p, batch, state)[0].params['layers']
  size = 0.0
  for i, layer in adapter['layers'].items():
    for name, ab in layer.items():
      slope, (a, b) = np.float64(dense[i][name]['kernel']), (np.float64(ab[k]) for k in 'ab')
      np.testing.assert_allclose(got[i][name]['a'], 2.0 * slope @ b.T, atol=1e-5)
      np.testing.assert_allclose(got[i][name]['b'], 2.0 * a.T @ slope, atol=1e-5)
      size = max(size, np.abs(a.T @ slope).max())
  assert size > 1e-2


@pytest.mark.parametrize('remat', [False, True])
def test_no_gradient_of_a_frozen_matrix_is_computed(remat):
  """Products of the shape of a feed-forward block's second kernel, [48, 32], in the compiled update."""

  def products(p):
    given = train_state.abstract_state(p), empty_records.empty_batch(p)
    text = programs.compile_update(p).lower(*given).compile().as_text()
    assert ' dot(' in text
    return len(re.findall(r'= f32\[48,32\]\S* dot\(', text))

  assert products(spec(learner=dict(remat=remat))) > 0 == products(adapted(remat=remat))


def test_adapters_are_those_of_matrices_that_all_layers_have():
  """A layer that attends to keys and values of another has no such projections."""
  config = dataclasses.replace(
    MODEL, kv_readers=1, qk_norm='qkv', layer_input=4, layer_input_vocab=MODEL.vocab
  )
  names = lora.settings(LoraConfig(rank=2), config).names
  assert set(names) == {'q', 'o', 'gate', 'up', 'down', 'input_gate', 'input_down'}
  with pytest.raises(UserError, match=r"'\^k\$' matches no matrix of a layer"):
    lora.settings(LoraConfig(rank=2, targets='^k$'), config)


def test_a_step_changes_the_adapter_alone():
  base = decoder.init(MODEL, 0)
  p = adapted(lora=ON | dict(targets='^(q|v)$'))
  batch = graded(spec(), base)
  before = train_state.init_state(p, base)
  names = {
    sharding.path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(before.params)
  }
  assert names == {f'layers/{i}/{name}/{k}' for i in (0, 1) for name in 'qv' for k in 'ab'}
  count = len(names)
  moments = [x for x in jax.tree.leaves(before.opt_state) if x.ndim]
  assert sum(x.size for x in moments) == 2 * sum(x.size for x in jax.tree.leaves(before.params))
  assert len(moments) == 2 * count
  state, metrics = programs.compile_update(p)(before, batch)
  again, _ = programs.compile_update(p)(state, batch)
  start = lora.init(p.model.lora, base, 0)
  for a, b in zip(*map(jax.tree.leaves, (again.params, start)), strict=True):
    assert np.abs(np.asarray(a) - np.asarray(b)).max() > 1e-4
  jax.tree.map(np.testing.assert_array_equal, again.base, base)
  # Metrics are of the adapter: the first step of Adam moves each number of B by the learning rate, and A not yet.
  moved = sum(x.size for name, x in _leaves(start) if name.endswith('/b'))
  np.testing.assert_allclose(metrics['actor/update_norm'], 1e-2 * moved**0.5, rtol=1e-3)


def _leaves(tree):
  return [(sharding.path_name(path), x) for path, x in jax.tree_util.tree_leaves_with_path(tree)]


def test_the_base_has_the_type_of_compute_and_norms_keep_theirs():
  p = adapted(dtype='bfloat16')
  state = train_state.init_state(p, decoder.init(MODEL, 0))
  for name, x in _leaves(state.base):
    assert x.dtype == (jnp.float32 if name.endswith('scale') else jnp.bfloat16), name
  assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype('float32')}
  merged = train_state.merged_weights(p, state)
  assert merged['layers'][0]['q']['kernel'].dtype == jnp.float32


def test_the_base_is_the_reference_and_no_copy_is_kept():
  base = decoder.init(MODEL, 0)
  batch = graded(spec(), base)
  with_kl = chosen(kl=dict(fn='k3', coef=0.1))
  p = adapted(objective=with_kl)
  update, state = programs.compile_update(p), train_state.init_state(p, base)
  assert p.objective.method.needs_reference and state.reference is None
  state, first = update(state, batch)
  on_host = jax.device_get(state)
  state, second = update(state, batch)
  assert float(first['actor/kl_loss']) == 0 and float(second['actor/kl_loss']) > 1e-5
  # As a plain program has it that stands at the merged weights and keeps the base for reference.
  plain = spec(objective=with_kl)
  merged = train_state.init_state(plain, lora.merge(base, on_host.params, 6.0))
  merged = merged._replace(reference=base, step=jnp.int32(1))
  _, want = programs.compile_update(plain)(merged, batch)
  np.testing.assert_allclose(second['actor/kl_loss'], want['actor/kl_loss'], rtol=1e-3)


@pytest.mark.parametrize(
  'stages',
  [
    dict(old_policy=dict(fn='average', decay=0.5)),
    dict(importance_correction=dict(fn='token')),
    dict(importance_correction=dict(fn='second_moment_mask', budget=0.04)),
  ],
  ids=['average', 'old', 'rows'],
)
def test_passes_before_the_gradient_see_the_adapter(stages):
  """Each tells of base and adapter what it tells of the merged weights."""
  base, adapter = decoder.init(MODEL, 0), drawn()
  batch = off_policy(graded(spec(), base))
  p, plain = adapted(objective=chosen(**stages)), spec(objective=chosen(**stages))
  merged = train_state.init_state(plain, lora.merge(base, adapter, 6.0))
  state = train_state.init_state(p, base)._replace(params=adapter)
  if state.average is not None:
    state = state._replace(average=drawn(1))
    merged = merged._replace(average=lora.merge(base, drawn(1), 6.0))
  want, got = (programs.compile_update(x)(s, batch)[1] for x, s in ((plain, merged), (p, state)))
  for name in ('actor/ppo_kl', 'actor/entropy', 'actor/pg_loss', 'actor/pg_clipfrac'):
    np.testing.assert_allclose(got[name], want[name], atol=1e-5, err_msg=name)
  assert abs(float(want['actor/ppo_kl'])) > 1e-3


def test_norms_of_rows_are_those_of_the_adapters_gradient():
  base, adapter = decoder.init(MODEL, 0), drawn()
  batch = jax.tree.map(jnp.asarray, graded(spec(), base))
  p = adapted()
  got = jax.jit(lambda a: leverage.row_leverage(p, a, batch, base))(adapter)

  def answer(adapter):
    weights = lora.merge(base, adapter, 6.0)
    logp_BxT = microbatch.log_probs(p, weights, batch.prompts, batch.rollout.tokens_BxT)[0]
    return jnp.where(jnp.arange(T) < batch.rollout.length_B[5], logp_BxT[5], 0.0).sum()

  logp, slope = jax.jit(jax.value_and_grad(answer))(adapter)
  real_T = np.arange(T) < batch.rollout.length_B[5]
  log_w = logp - np.asarray(batch.rollout.logp_BxT[5])[real_T].sum()
  norm = sum(float((x**2).sum()) for x in jax.tree.leaves(slope)) ** 0.5
  np.testing.assert_allclose(got[5], log_w + np.log(norm), atol=1e-3)


@pytest.mark.parametrize(
  'mesh, remat', [(dict(data=2, fsdp=2, tensor=2), True), (dict(fsdp=4), False)]
)
def test_every_mesh_gives_the_tokens_and_metrics_of_one_device(mesh, remat):
  c = config(lora=ON, learner=dict(remat=remat))
  c.mesh.update(mesh)
  count = int(np.prod(list(mesh.values())))
  many = make_spec(c, MODEL, (3, 7), sharding.make_mesh(c.mesh, jax.devices()[:count]))
  (single, state), (other, state8) = train(adapted(), 3), train(many, 3)
  for (tokens, metrics), (tokens8, metrics8) in zip(single, other, strict=True):
    np.testing.assert_array_equal(tokens, tokens8)
    for name, value in metrics.items():
      np.testing.assert_allclose(metrics8[name], value, atol=1e-4, rtol=1e-4, err_msg=name)
  assert_close(state.params, state8.params, 1e-4)
  fsdp, tensor = mesh['fsdp'], mesh.get('tensor', 1)
  parts = {name: x.addressable_shards[0].data.shape for name, x in _leaves(state8.params)}
  assert parts['layers/0/q/a'] == (32 // fsdp, 3) and parts['layers/0/q/b'] == (3, 32 // tensor)
  assert parts['layers/1/down/a'] == (48 // tensor, 3)
  assert parts['layers/1/down/b'] == (3, 32 // fsdp)


RUN = dict(
  mode='split',
  steps=4,
  sft=dict(steps=0),
  evaluation=dict(every=0, prompts=4, samples=1),
  # A model drawn at random is never right: it learns from demonstrations.
  objective=dict(kl=dict(fn='k3', coef=0.05), sft_loss=dict(fn='likelihood', weight=1.0)),
  optimizer=dict(learning_rate=1e-2),
  rewards=dict(fn='exact', workers=1),
  lora=dict(rank=2, alpha=4.0),
)


def test_stopped_and_resumed_it_is_the_uninterrupted_run_and_no_checkpoint_holds_the_base(tmp_path):
  def run(folder, count):
    c = configs.load(tiny_job.config_file(tmp_path, **RUN | dict(steps=count)))
    runs.run(c, str(tmp_path / folder), sharding.make_mesh(c.mesh, jax.devices()[:1]))
    return tiny_job.rows(tmp_path / folder)

  want = run('whole', 4)
  run('parts', 2)
  saved = json.loads((tmp_path / 'parts/checkpoints/step_000002/manifest.json').read_text())
  kernels = [name for name in saved['leaves'] if 'kernel' in name or 'embedding' in name]
  assert not kernels and any("['q']['a']" in name for name in saved['leaves'])
  assert run('parts', 4) == want
  losses = [row['actor/sft_loss'] for row in want[1:]]
  assert want[-1]['actor/kl_loss'] > 0 and losses[-1] < losses[0] - 0.1
  last_evaluation = lambda folder: json.loads(_evals(tmp_path / folder)[-1].read_text())  # noqa: E731
  assert last_evaluation('parts') == last_evaluation('whole')


def _evals(folder: pathlib.Path):
  return sorted(folder.glob('**/eval*/*000004*'))


MIXTURE = dataclasses.replace(MODEL, mlp=24, experts=4, experts_per_token=2)


@pytest.mark.parametrize(
  'settings, model, message',
  [
    (dict(targets='head$'), MODEL, "targets='head\\$' matches no matrix .* match some of: .*q"),
    (dict(rank=33), MODEL, 'config.lora.rank=33 must be at most the width of the model, 32'),
    (dict(), MIXTURE, "matches 'experts/.*' of a mixture of experts.*attention"),
    (dict(targets='router'), MIXTURE, "matches 'experts/router'"),
  ],
)
def test_models_that_cannot_have_an_adapter_are_refused(settings, model, message):
  c = config(lora=ON | settings)
  with pytest.raises(UserError, match=message):
    make_spec(c, model, (3,), sharding.make_mesh(c.mesh, jax.devices()[:1]))


def test_attention_of_a_mixture_may_have_one():
  c = config(lora=ON | dict(targets='^(q|k|v|o)$'))
  p = make_spec(c, MIXTURE, (3,), sharding.make_mesh(c.mesh, jax.devices()[:1]))
  state = train_state.init_state(p, decoder.init(MIXTURE, 0))
  assert {name.split('/')[2] for name, _ in _leaves(state.params)} == {*'qkvo'}
  prompts = empty_records.empty_batch(p).prompts
  sampled = jax.eval_shape(lambda s: steps.generate(p, s, prompts)[0], state)
  assert sampled.tokens_BxT.shape == (P * G, T)


@pytest.mark.parametrize(
  'changes, message',
  [
    (dict(lora=dict(rank=-1)), 'config.lora.rank=-1 must be a whole number of at least 0'),
    (dict(lora=dict(alpha=0.0)), 'config.lora.alpha=0.0 must be a finite number above 0'),
    (dict(lora=dict(targets='(q')), "config.lora.targets='\\(q' is no regular expression"),
    (
      dict(lora=dict(rank=2), sft=dict(steps=3)),
      'config.lora.rank=2 does not go with config.sft.steps=3',
    ),
    (
      dict(
        lora=dict(rank=2), objective=dict(auxiliary_model=dict(fn='critic', learning_rate=1e-3))
      ),
      'saves the memory of training all weights',
    ),
  ],
)
def test_bad_settings_are_one_sentence(tmp_path, changes, message):
  c = configs.load(tiny_job.config_file(tmp_path, **dict(sft=None) | changes))
  with pytest.raises(UserError, match=message):
    validate.validate(c)
