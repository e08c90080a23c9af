"""Decoding and update on one accelerator against its peak figures: random weights of Qwen3's shapes, in bfloat16.

    python -m tests.bench.accelerator [--cases=0.6b,1.7b,8b] [--rounds=3] [--set=learner.attention=xla] [--label=NAME]
      [--parts=rollout,gap,update,step] [--write] [--smoke]

configs/dapo.py with random tokens; no token ends a row, so that all rows are full, and rewards are drawn, so that every
group is learned. A case is a process of its own. Measured are, as medians over the rounds after a first one:

  iteration  seconds of a decode iteration, from rollouts of all and of half of the tokens; against the bytes that it
             reads (weights in bfloat16, caches of prompts, and the ring, once at its full width and once its live part)
  update     seconds, against the operations of forward and backward pass without recomputation (MFU)
  step       seconds of the fused step, in which both halves are one program
  gap        mean and largest |Δ log p| between sampler and update, over the tokens of a rollout

Printed, too: the bandwidth of a copy (bytes read and written) and the rate of a product of 8,192 × 8,192 matrices.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import models, step
from jaxrl_llm.config import loading
from jaxrl_llm.distributed import hardware, sharding
from jaxrl_llm.learner import compile as programs
from jaxrl_llm.learner import device_memory, empty_records, microbatch
from jaxrl_llm.learner import state as train_state
from jaxrl_llm.learner.spec_from_config import make_spec
from jaxrl_llm.learner.step_spec import StepSpec
from jaxrl_llm.models import decoder
from jaxrl_llm.profiling import hlo_update, roofline
from jaxrl_llm.types import Batch, Params, Prompts
from tests.bench import slices
from tests.bench.lib import results, smoke

PACKAGES = ('jax', 'jaxlib', 'flax')
PARTS = ('rollout', 'gap', 'update', 'step')


class Case(NamedTuple):
  """A model and a batch."""

  model: str  # a key of slices.SIZES
  prompts: int
  rollouts: int
  prompt_tokens: int
  completion_tokens: int
  more: tuple[str, ...] = ()  # overrides of the configuration


CASES = {
  'tiny': Case('tiny', 2, 2, 16, 32),
  '0.6b': Case('0.6b', 8, 8, 512, 1024),
  '1.7b': Case('1.7b', 8, 8, 512, 1024),
  '1.7b-long': Case('1.7b', 2, 8, 1024, 8192),
  '8b': Case('8b', 8, 8, 512, 1024, ('optimizer.moments_dtype=bfloat16',)),
}


def spec_of(case: Case, overrides: list[str]) -> StepSpec:
  """The step of a case on the first device."""
  with tempfile.TemporaryDirectory() as folder:
    shape = slices.SHARED | slices.SIZES[case.model]
    pathlib.Path(folder, 'config.json').write_text(json.dumps(shape))
    sizes = {k: v for k, v in case._asdict().items() if k not in ('model', 'more')}
    lines = [f'{name}={value}' for name, value in sizes.items()]
    lines += [f'model={folder}', 'optimizer.learning_rate=1e-6', *case.more, *overrides]
    config = loading.load('dapo', [f'--config.{line}' for line in lines])
    mesh = sharding.make_mesh(config.mesh, jax.devices()[:1])
    return make_spec(config, models.read_shape(folder, scratch=None), (), mesh)


def random_weights(spec: StepSpec) -> Params:
  """Made on the device: kernels of variance 1 / inputs, norms of 1."""
  leaves, tree = jax.tree.flatten(decoder.abstract_params(spec.model.config))

  @functools.partial(jax.jit, static_argnums=0)  # compiled once for all leaves of a shape
  def draw(shape, number):
    key = jax.random.key(number, impl='rbg')  # which GPUs and TPUs compile faster
    return jax.random.normal(key, shape, jnp.float32) * shape[0] ** -0.5

  new = [
    draw(x.shape, i) if len(x.shape) > 1 else jnp.ones(x.shape) for i, x in enumerate(leaves)
  ]
  return jax.tree.unflatten(tree, new)


class Job:
  """The state and the inputs of a case, and seconds of its programs."""

  def __init__(self, spec: StepSpec, rounds: int):
    self.spec, self.rounds, random = spec, rounds, np.random.default_rng(0)
    P, L = spec.layout.prompts, spec.layout.prompt_tokens
    tokens_PxL = random.integers(0, spec.model.config.vocab, (P, L)).astype(np.int32)
    index_P = np.arange(P, dtype=np.int32)
    zeros_P = np.zeros(P, np.float32)
    self.prompts = Prompts(tokens_PxL, np.full(P, L, np.int32), index_P, index_P * 0, zeros_P)
    self.reward_B = random.normal(size=P * spec.layout.group).astype(np.float32)
    self.state = train_state.init_state(spec, random_weights(spec))
    self.compile_s: dict[str, float] = {}

  def timed(self, name: str, run: Callable[[], Any]) -> tuple[float, Any]:
    """The median seconds of `run`, and its last result; the first call, which compiles, counts apart."""
    seconds = []
    for number in range(self.rounds + 1):
      began = time.perf_counter()
      result = jax.block_until_ready(run())
      took = time.perf_counter() - began
      if number:
        seconds.append(took)
      else:
        self.compile_s[name] = took
    self.compile_s[name] -= statistics.median(seconds)
    return statistics.median(seconds), result

  def sampled(self) -> tuple[float, float, Any]:
    """Seconds of a rollout of half of the tokens and of all, and the latter."""
    program, T = programs.compile_sample(self.spec), self.spec.rollout.decode.max_tokens
    state = self.state._replace(carried=())

    def sample(tokens: int):
      cap_B = np.full(len(self.reward_B), tokens, np.int32)
      return lambda: program(state, self.state.carried, self.prompts, None, None, cap_B)

    whole_s, (rollout, *_) = self.timed('rollout', sample(T))
    half_s, _ = self.timed('half', sample(T // 2))
    np.testing.assert_array_equal(rollout.length_B, T)
    return half_s, whole_s, rollout

  def batch(self, rollout: Any) -> Batch:
    """A fresh copy of a graded batch: programs take the memory of their argument."""
    return jax.tree.map(np.array, Batch(self.prompts, rollout, self.reward_B, self.reward_B))

  def learned(self, rollout: Any) -> float:
    """Seconds of an update."""
    program = programs.compile_update(self.spec)

    def learn():
      self.state, metrics = program(self.state, self.batch(rollout))
      return metrics

    return self.timed('update', learn)[0]

  def stepped(self, rollout: Any) -> float:
    """Seconds of a fused step."""
    program = step.compile_step(self.spec)
    cap = np.int32(self.spec.rollout.decode.max_tokens)

    def run():
      batch = self.batch(rollout)
      self.state, sampled, metrics = program(self.state, batch, self.prompts, None, None, cap)
      return sampled, metrics

    return self.timed('step', run)[0]

  def gap(self, rollout: Any) -> tuple[float, float]:
    """Mean and largest |Δ log p| of a rollout that the weights of now have sampled."""

    def score(spec, params, batch):
      return microbatch.all_log_probs(spec, params, microbatch.pack(spec, batch))[0]

    program = jax.jit(sharding.on_mesh(score), static_argnums=0)
    logp_BxT = program(self.spec, self.state.params, self.batch(rollout))
    gap_BxT = np.abs(np.asarray(logp_BxT, np.float64) - np.asarray(rollout.logp_BxT, np.float64))
    return float(gap_BxT.mean()), float(gap_BxT.max())


def measure(case: Case, overrides: list[str], rounds: int, parts: list[str]) -> dict[str, Any]:
  """The figures of a case; NaN for parts that are left out."""
  spec, nan = spec_of(case, overrides), float('nan')
  job = Job(spec, rounds)
  half_s, whole_s, rollout = job.sampled()
  gap = job.gap(rollout) if 'gap' in parts else (nan, nan)
  update_s = job.learned(rollout) if 'update' in parts else nan
  step_s = job.stepped(rollout) if 'step' in parts else nan
  T = case.completion_tokens
  iteration_s = (whole_s - half_s) / (T - T // 2)
  cost, flops = roofline.decode(spec, device_memory.ring_bytes(spec)), hlo_update.update_flops(spec)
  # The second half of the rollout is timed, in which three quarters of the ring are live on average.
  fixed = cost.weight_bytes + cost.prompt_cache_bytes
  memory = jax.devices()[0].memory_stats() or {}
  tokens = case.prompts * case.rollouts * T
  return dict(
    attention=_name(spec.update.attention),
    decode_attention=_name(spec.rollout.decode.attend),
    rollout_s=whole_s,
    iteration_ms=1e3 * iteration_s,
    read_gb=(fixed + cost.cache_bytes) / 1e9,
    live_gb=(fixed + cost.cache_bytes * 3 / 4) / 1e9,
    iteration_s=iteration_s,
    update_s=update_s,
    update_tflops=flops.model / 1e12,
    executed_tflops=flops.executed / 1e12,
    step_s=step_s,
    sampled_per_s=tokens / whole_s,
    trained_per_s=tokens / step_s,
    gap_mean=gap[0],
    gap_max=gap[1],
    peak_gib=memory.get('peak_bytes_in_use', 0) / 2**30,
    compile_s=job.compile_s,
  )


def _name(kernel: Any) -> str:
  return 'xla' if kernel is None else kernel.func.__module__.rpartition('.')[2]


def ceilings() -> dict[str, float]:
  """Bytes a second of a copy, and operations a second of a product in bfloat16, the best of five."""
  is_cpu = jax.default_backend() == 'cpu'
  numbers, side = (2**20, 256) if is_cpu else (2**30, 8192)
  x = jnp.ones(numbers, jnp.bfloat16)
  a, b = jax.random.normal(jax.random.key(0), (2, side, side), jnp.bfloat16)
  copy_s, product_s = _fastest(lambda x: x + 1, x), _fastest(lambda a, b: a @ b, a, b)
  return dict(copy=2 * x.nbytes / copy_s, product=2 * side**3 / product_s)


def _fastest(function: Callable, *arguments: jax.Array) -> float:
  """Seconds of one call among ten in a row, the best of five."""
  run, seconds = jax.jit(function), []
  for _ in range(6):
    began = time.perf_counter()
    out = [run(*arguments) for _ in range(10)]
    jax.block_until_ready(out[-1])
    seconds.append((time.perf_counter() - began) / 10)
  return min(seconds[1:])


def report(rows: dict[str, dict[str, Any]], limits: dict[str, float], facts: str) -> str:
  """The section, in Markdown."""
  device = jax.devices()[0]
  chip = hardware.CHIPS.get(device.device_kind, hardware.Chip(limits['product'], limits['copy'], 1))
  header = (
    'case', 'attention', 'iteration, ms', 'GB/s read', 'of peak', 'of peak, live columns', 'sampled tokens/s',
    'update, s', 'MFU', 'with recomputation', 'step, s', 'tokens/s', '|Δ log p| mean, largest', 'peak GiB',
  )  # fmt: skip
  cells = []
  for name, row in rows.items():
    rate, live = (row[k] * 1e9 / row['iteration_s'] for k in ('read_gb', 'live_gb'))
    used, executed = (
      row[k] * 1e12 / row['update_s'] / chip.flops for k in ('update_tflops', 'executed_tflops')
    )
    cells.append([
      name, f'{row["attention"]}, {row["decode_attention"]}', f'{row["iteration_ms"]:.2f}', f'{rate / 1e9:,.0f}',
      f'{rate / chip.memory_bandwidth:.0%}', f'{live / chip.memory_bandwidth:.0%}', f'{row["sampled_per_s"]:,.0f}',
      f'{row["update_s"]:.2f}', f'{used:.0%}', f'{executed:.0%}', f'{row["step_s"]:.2f}',
      f'{row["trained_per_s"]:,.0f}', f'{row["gap_mean"]:.1e}, {row["gap_max"]:.1e}', f'{row["peak_gib"]:.1f}',
    ])  # fmt: skip
  compiled = '; '.join(
    f'{name}: ' + ', '.join(f'{k} {s:.0f}' for k, s in row['compile_s'].items() if k != 'half')
    for name, row in rows.items()
  )
  text = (
    f'{device.device_kind}: a copy moves {limits["copy"] / 1e9:,.0f} GB/s, a product of two 8,192 × 8,192 matrices '
    f'runs at {limits["product"] / 1e12:,.0f} TFLOP/s; by the data sheet {chip.memory_bandwidth / 1e9:,.0f} and '
    f'{chip.flops / 1e12:,.0f}, which the shares are of. Compilation and first call, seconds: {compiled}.'
  )
  return '\n'.join([results.table(header, cells), '', text, facts])


def run_case(name: str, args: argparse.Namespace) -> dict[str, Any] | None:
  """The figures of a case from a process of its own, which frees its memory; None where it fails."""
  command = [sys.executable, '-m', 'tests.bench.accelerator', '--case', name]
  command += [f'--rounds={args.rounds}', f'--parts={",".join(args.parts)}', *(f'--set={x}' for x in args.set)]
  done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ))
  if done.returncode:
    print(f'{name} ended with status {done.returncode}; see above.', file=sys.stderr)
    return None
  row = json.loads(done.stdout.splitlines()[-1])
  print(f'{name}: {row}', file=sys.stderr, flush=True)
  return row


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--cases', default='0.6b,1.7b,8b')
  parser.add_argument('--case', choices=list(CASES), help='one case in this process, as JSON')
  parser.add_argument('--rounds', type=int, default=3)
  parser.add_argument('--parts', type=lambda text: text.split(','), default=list(PARTS))
  parser.add_argument('--set', action='append', default=[], help='an override of the config')
  parser.add_argument('--label', default='', help='name of the section; default: the device')
  parser.add_argument('--write', action='store_true', help='write results/accelerator.md')
  args = smoke.parse(parser, cases='tiny', rounds=1)
  if args.case:
    print(json.dumps(measure(CASES[args.case], args.set, args.rounds, args.parts)))
    return
  # jax takes most of a GPU's memory when it is first used: after the cases.
  found = {name: run_case(name, args) for name in args.cases.split(',')}
  rows = {name: row for name, row in found.items() if row is not None}
  facts = results.facts(PACKAGES, results.load_average())
  text = report(rows, ceilings(), facts)
  print(text)
  if args.write:
    label = args.label or jax.devices()[0].device_kind
    results.write(results.path('accelerator.md', args.smoke), label, text)
  if len(rows) < len(found):
    sys.exit(1)


if __name__ == '__main__':
  main()
