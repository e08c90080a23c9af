"""The reference model that follows the policy, by TRL's callback: weights of two tensors over 12 optimizer steps."""

from __future__ import annotations

import ast
import types

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.objective import reference
from tests.objective.official import lib

CALLBACKS = 'trl/trainer/callbacks.py'
OFFICIAL = lib.Official(
  'huggingface/trl', 'f2cd57710ae345ea6428ae95363267fcf38a3dc8', (CALLBACKS,), 'Apache-2.0'
)
RULE = dict(every=5, mixup=0.6)
STEPS = 12
WITHOUT = {'*': 'its inputs are weights'}
MUTANTS = {
  'the other share': (reference, 'keep * x + self.mixup * y', 'self.mixup * x + keep * y'),
  'one step late': (reference, 'step % self.every == 0', 'step % self.every == 1'),
}


def draw(seed):
  """Weights of the policy after every step; the first are those of the reference model, too."""
  r = np.random.default_rng(seed)
  return dict(
    first=np.round(r.normal(size=(STEPS + 1, 3, 2)), 4),
    second=np.round(r.normal(size=(STEPS + 1, 4)), 4),
  )


def official(torch, read, data):
  tree = next(
    n for n in ast.parse(read(CALLBACKS)).body if getattr(n, 'name', '') == 'SyncRefModelCallback'
  )
  methods = {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef)}
  sync = lib.functions(ast.unparse(methods['_sync_target_model']), ('_sync_target_model',))
  end = lib.functions(ast.unparse(methods['on_step_end']), ('on_step_end',)).on_step_end
  weights = lambda step: [torch.tensor(data[k][step]) for k in ('first', 'second')]  # noqa: E731

  def module(tensors):
    held = [torch.nn.Parameter(x) for x in tensors]
    return types.SimpleNamespace(parameters=lambda: held, held=held)

  kept = module(weights(0))
  callback = types.SimpleNamespace(
    ref_model=kept, accelerator=None, sync_target_model=sync._sync_target_model
  )
  args = types.SimpleNamespace(
    ref_model_sync_steps=RULE['every'], ref_model_mixup_alpha=RULE['mixup']
  )
  seen = []
  for step in range(1, STEPS + 1):
    state = types.SimpleNamespace(global_step=step)
    end(callback, args, state, None, model=module(weights(step)))
    seen.append(np.concatenate([x.detach().numpy().ravel().copy() for x in kept.held]))
  return dict(reference=np.stack(seen))


def ours(data):
  rule, seen = reference.refreshed(**RULE), []
  weights = lambda step: [jnp.asarray(data[k][step]) for k in ('first', 'second')]  # noqa: E731
  kept = weights(0)
  for step in range(1, STEPS + 1):
    kept = rule.after_step(jnp.int32(step), kept, weights(step))
    seen.append(np.concatenate([np.asarray(x).ravel() for x in kept]))
  return dict(reference=np.stack(seen))


lib.main(__name__)
