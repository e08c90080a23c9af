"""AdamW's moments in float32, in bfloat16 rounded stochastically, and in bfloat16 rounded to the nearest.

    python -m tests.bench.moments [--steps=3000] [--seeds=2] [--job] [--write] [--smoke]

A quadratic with noise: 4,096 weights of different curvature, gradients with normal noise that is 100 times larger in
the first tenth of the steps, as after a bad start. Afterwards the second moment has to fall by four orders of
magnitude, by a factor of b2 per step. Printed are the loss at the end and the second moment over that in float32.
`--job` also trains configs/tiny.py with each, for `--seeds` seeds, and prints the held-out accuracy at the end.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import pathlib
import tempfile

os.environ.setdefault('JAX_PLATFORMS', 'cpu')

import jax
import jax.numpy as jnp
import optax

from jaxrl_llm import main as command_line
from jaxrl_llm.learner import rounded_adam
from jaxrl_llm.models import linear
from tests.bench.lib import results, smoke

N, B1, EPS, RATE = 4096, 0.9, 1e-8, 1e-3
ARMS = {
  'float32': (),
  'bfloat16, stochastic': ('--config.optimizer.moments_dtype=bfloat16',),
  'bfloat16, nearest': ('--config.optimizer.fn=tests.bench.moments:nearest_adamw',),
}


def nearest_adamw(learning_rate, weight_decay=0.0, b1=0.9, b2=0.95, eps=1e-8):
  """AdamW whose moments are rounded to the nearest number of bfloat16 after every step."""
  return optax.chain(
    _nearest(b1, b2, eps),
    optax.add_decayed_weights(weight_decay, linear.matrices),
    optax.scale_by_learning_rate(learning_rate),
  )


def _nearest(b1: float, b2: float, eps: float) -> optax.GradientTransformation:
  exact = optax.scale_by_adam(b1, b2, eps)

  def cast(state, dtype):
    mu, nu = (optax.tree.cast(tree, dtype) for tree in (state.mu, state.nu))
    return state._replace(mu=mu, nu=nu)

  def update(grads, state, params=None):
    step, state = exact.update(grads, cast(state, jnp.float32), params)
    # XLA may drop a conversion to bfloat16 and back; the barrier keeps it.
    return step, jax.lax.optimization_barrier(cast(state, jnp.bfloat16))

  return optax.GradientTransformation(lambda params: cast(exact.init(params), jnp.bfloat16), update)


def adam(arm: str, b2: float) -> optax.GradientTransformation:
  """Adam without a learning rate, its moments as the arm stores them."""
  return {
    'float32': lambda: optax.scale_by_adam(B1, b2, EPS),
    'bfloat16, stochastic': lambda: rounded_adam.scale_by_adam(B1, b2, EPS, seed=0),
    'bfloat16, nearest': lambda: _nearest(B1, b2, EPS),
  }[arm]()


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def descend(arm: str, b2: float, steps: int) -> tuple[jax.Array, jax.Array]:
  """The mean loss of the last tenth of the steps on ½·Σ h·w², and the mean second moment at the end."""
  optimizer, key = adam(arm, b2), jax.random.key(0)
  curvature_N = jnp.geomspace(0.1, 1.0, N)

  def step(carry, index):
    weight_N, state = carry
    scale = jnp.where(index < steps // 10, 10.0, 0.1)
    noise_N = scale * jax.random.normal(jax.random.fold_in(key, index), (N,))
    direction, state = optimizer.update(curvature_N * weight_N + noise_N, state)
    weight_N = weight_N - RATE * direction
    return (weight_N, state), 0.5 * (curvature_N * weight_N**2).mean()

  begin = 2 * jnp.ones(N)
  (_, state), loss_S = jax.lax.scan(step, (begin, optimizer.init(begin)), jnp.arange(steps))
  return loss_S[-(steps // 10) :].mean(), state.nu.astype(jnp.float32).mean()


def quadratic(steps: int) -> list[list[str]]:
  """Rows of the table: b2, then loss and second moment of each arm."""
  rows = []
  for b2 in (0.95, 0.999):
    reference = descend('float32', b2, steps)[1]
    for arm in ARMS:
      loss, nu = descend(arm, b2, steps)
      rows.append([f'{b2}', arm, f'{float(loss):.4f}', f'{float(nu / reference):.3f}'])
  return rows


def job(seeds: int, overrides: tuple[str, ...]) -> list[list[str]]:
  """Rows of the table: the arm, and for each seed the held-out accuracy of the tiny job at its end, in percent."""
  rows = []
  for arm, flags in ARMS.items():
    row = [arm]
    for seed in range(seeds):
      with tempfile.TemporaryDirectory() as folder:
        argv = ['--config=tiny', f'--workdir={folder}/run', f'--config.seed={seed}']
        argv.append('--config.monitoring.console=quiet')  # the output becomes a section
        assert command_line.main([*argv, *flags, *overrides]) == 0
        row.append(f'{100 * accuracy(pathlib.Path(folder) / "run"):.1f}')
    rows.append(row)
  return rows


def accuracy(run: pathlib.Path) -> float:
  """Greedy held-out accuracy of the last evaluation."""
  last = sorted((run / 'eval').glob('step_*.json'))[-1]
  return json.loads(last.read_text())['metrics']['val-core/all/acc/greedy']


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--steps', type=int, default=3000, help='of the quadratic')
  parser.add_argument('--seeds', type=int, default=2, help='of the tiny job')
  parser.add_argument('--job', action='store_true', help='train configs/tiny.py, too')
  parser.add_argument(
    '--b2', default='0.95,0.999', help='of the tiny job: one table each, such as 0.999'
  )
  options = smoke.parse(parser, steps=20, seeds=1)
  header = ['b2', 'moments', 'loss at the end', 'second moment over that in float32']
  print(results.table(header, quadratic(options.steps)))
  if not options.job:
    return
  tiny = tuple(f'--config.{field}' for field in smoke.TINY) if options.smoke else ()
  for b2 in options.b2.split(','):
    print(f'\nHeld-out accuracy of configs/tiny.py with b2 = {b2}, percent:\n')
    rows = job(options.seeds, (f'--config.optimizer.b2={b2}', *tiny))
    header = ['moments', *(f'seed {seed}' for seed in range(options.seeds))]
    print(results.table(header, rows))


if __name__ == '__main__':
  main()
