"""SFPO: when its fast steps end, and the weights after fast steps, part of the way back and a slow step.

The official loop is run with a policy of two matrices whose step is down a fixed quadratic.
"""

from __future__ import annotations

import ast
import contextlib
import types

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.learner import inner_steps
from tests.objective.official import lib

RULE = 'Code/SFPO/verl/trainer/ppo/ray_trainer.py'
STEPS = 'Demo/fsdp_workers.py'
OFFICIAL = lib.Official(
  'Urheen/SFPO', 'e7b765e6bfa2e12baf95315471a1ea0f3d1210e4', (RULE, STEPS), 'Apache-2.0'
)
SETTINGS = dict(fast_steps=3, alpha=0.8, window=30, threshold=1.0)
SEEDS = (0, 1, 2, 3)
WITHOUT = {'*': 'entropies and weights'}
MUTANTS = {
  'falls of the entropy': (inner_steps, 'deviation = entropy - entropy_W.mean()', 'deviation = jnp.abs(entropy - entropy_W.mean())'),
  'window without the newest': (inner_steps, 'entropy_W.std() + 1e-9', 'state.entropy_W.std() + 1e-9'),
  'std over n − 1': (inner_steps, 'entropy_W.std()', 'entropy_W.std(ddof=1)'),
  'window one longer': (inner_steps, 'state.observed + 1 >= self.window', 'state.observed >= self.window'),
  'threshold': (inner_steps, 'self.threshold * ', '1.1 * self.threshold * '),
  'share of the way': (inner_steps, '(1 - self.alpha) * (x - y)', '(0.9 - self.alpha) * (x - y)'),
  'no end': (inner_steps, '(state.stopped > 0) | ', '(state.stopped < 0) | '),
}  # fmt: skip


# step → standard deviations above the mean: nearly enough, then just enough; in the last draw as soon as it may be
RISES = ({40: 0.99, 55: 1.008}, {35: 0.985, 70: 1.01}, {50: 0.995, 51: 1.3}, {29: 1.005, 60: 2.0})


def draw(seed):
  """Entropies of 80 steps that fall, with noise and rises; weights, and the slope and curvature of their loss."""
  r, entropy = np.random.default_rng(seed), []
  for step in range(80):
    value = 1.2 - 0.01 * step + 0.1 * r.normal()
    if step >= 29:
      high = RISES[seed].get(step)
      value = risen(entropy[-29:], high) if high else min(value, risen(entropy[-29:], 0.9))
    entropy.append(round(float(value), 6))
  near = lambda *shape: np.round(r.normal(size=shape), 4)  # noqa: E731
  return dict(
    entropy=np.array(entropy),
    first=near(3, 2),
    second=near(4),
    slope=near(3, 2),
    curvature=np.round(r.uniform(0.2, 1.5, 4), 4),
  )


def risen(before, high):
  """The value that is `high` standard deviations above the mean of a window that ends with it, by bisection."""
  low, up = min(before), max(before) + 10
  for _ in range(60):
    middle = (low + up) / 2
    window = np.array([*before, middle])
    low, up = (middle, up) if middle - window.mean() < high * window.std() else (low, middle)
  return middle


def official(torch, read, data):
  return dict(stopped=_stops(read, data), **_weights(torch, read, data))


def _stops(read, data):
  """1 for the steps whose fast steps are left out."""
  (rule,) = (
    node
    for node in ast.walk(ast.parse(read(RULE)))
    if isinstance(node, ast.If) and 'len(self.entropy_container) >=' in ast.unparse(node.test)
  )
  code = compile(ast.Module([rule], []), '<official>', 'exec')
  actor = types.SimpleNamespace(zscore_w=30, zscore_threshold=1.0)
  trainer = types.SimpleNamespace(
    entropy_container=[],
    stop_SFPO=False,
    config=types.SimpleNamespace(actor_rollout_ref=types.SimpleNamespace(actor=actor)),
  )
  out = []
  for value in data['entropy']:
    exec(code, dict(self=trainer, np=np))
    out.append(float(trainer.stop_SFPO))
    trainer.entropy_container.append(float(value))
  return out


def _weights(torch, read, data):
  tree = ast.parse(read(STEPS))
  (method,) = (
    n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == 'sfpo_update_actor'
  )
  nothing = lambda *a, **k: None  # noqa: E731

  @contextlib.contextmanager
  def timer(**_):
    yield types.SimpleNamespace(last=1.0)

  code = lib.functions(
    ast.unparse(method), ('sfpo_update_actor',), torch=torch, Timer=timer, logger=None,
    log_gpu_memory_usage=nothing, DataProto=lambda **_: types.SimpleNamespace(to=nothing), print=nothing,
  )  # fmt: skip
  first = torch.nn.Parameter(torch.tensor(data['first']))
  second = torch.nn.Parameter(torch.tensor(data['second']))

  def step(data_=None, **_):
    with torch.no_grad():
      new = descend(data, first.numpy(), second.numpy())
      first.copy_(torch.tensor(new[0]))
      second.copy_(torch.tensor(new[1]))
    return {}

  class Sharding(contextlib.nullcontext):
    preprocess_data = postprocess_data = staticmethod(lambda data: data)

  config = types.SimpleNamespace(sfpo_inner_steps=3, sfpo_step_size=0.8, ppo_epochs=1)
  worker = types.SimpleNamespace(
    config=types.SimpleNamespace(actor=config), _is_actor=True, _is_offload_param=False, _is_offload_optimizer=False,
    actor=types.SimpleNamespace(update_policy=step), ulysses_sharding_manager=Sharding(), world_size=1,
    actor_module_fsdp=torch.nn.ParameterList([first, second]),
    actor_lr_scheduler=types.SimpleNamespace(step=nothing, get_last_lr=lambda: [0.0]),
    flops_counter=types.SimpleNamespace(estimate_flops=lambda *_: (1.0, 1.0)),
  )  # fmt: skip
  batch = types.SimpleNamespace(meta_info=dict(global_token_num=1))
  batch.batch, batch.to, batch.cuda = batch, lambda *_: batch, lambda: batch
  code.sfpo_update_actor(worker, batch)
  return dict(first=first.detach().numpy(), second=second.detach().numpy())


def descend(data, first, second):
  """One step of 0.1 down slope·first + curvature·second²/2 + (Σ first)·(Σ second)/5."""
  cross = 0.2
  return (
    first - 0.1 * (data['slope'] + cross * second.sum()),
    second - 0.1 * (data['curvature'] * second + cross * first.sum()),
  )


def ours(data):
  rule = inner_steps.slow_fast()
  assert rule == inner_steps.slow_fast(**SETTINGS)
  start = data['first'], data['second']
  now = start
  for _ in range(rule.fast_steps):
    now = descend(data, *now)
  first, second = descend(data, *rule.reposition(start, now))
  seen, stopped = rule.init()._replace(entropy_W=jnp.zeros(rule.window)), []
  for value in data['entropy']:
    stopped.append(float(rule.steps(seen) == 0))
    seen = rule.observe(seen, jnp.asarray(value), jnp.bool_(True))
  return dict(stopped=stopped, first=first, second=second)


lib.main(__name__)
