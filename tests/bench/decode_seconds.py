"""Seconds of decoding by the bytes that are read, at log-normal lengths: whole rings, live columns of rings, pages.

    python -m tests.bench.decode_seconds [--seeds=3] [--sigma=0.8] [--page=128] [--write] [--smoke]

Nothing is compiled or decoded: a queue without a model gives the iterations (tests/bench/test_decode_queue.py compares
it with the real loop), and the sizes are those that `--mode=compile` counts. Each chip has a queue of its own for its
share of the rows, in the order in which they come; an iteration waits for the chip that reads the most.

  whole rings    XLA's attention: every slot's ring in full
  live columns   the kernel: blocks of the ring that hold a token of the row; idle slots read nothing
  pages          not in this program: tokens in pages of --page, taken as rows grow. In the memory of the rings
                 as many slots as never need more, which takes lengths known in advance: a bound from above

A prompt is read once for its rows where every row has a slot, and once for each slot otherwise. Seconds are bytes ÷
memory bandwidth: no arithmetic, links, latency or look-ups in a page table.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import NamedTuple

import numpy as np

from jaxrl_llm.commands import compile_report, sharding_report
from jaxrl_llm.distributed import hardware, sharding
from jaxrl_llm.learner import device_memory
from jaxrl_llm.learner.step_spec import StepSpec
from jaxrl_llm.models import decode_attention
from jaxrl_llm.profiling import roofline
from tests.bench import slices
from tests.bench.lib import decode_queue, results, smoke

ROLLOUTS, PROMPT_TOKENS = 8, 1024


class Case(NamedTuple):
  """A model on a slice."""

  model: str  # of tests/bench/slices.py
  slice_: str
  kind: str  # jax's device kind
  prompts: int
  max_tokens: int
  mean_tokens: float


CASES = (
  Case('8b', 'v5p-128', 'TPU v5', 128, 20480, 3000),
  Case('8b', 'v6e-64', 'TPU v6 lite', 64, 8192, 2500),
  Case('1.7b', 'v5e-16', 'TPU v5 lite', 64, 8192, 2500),
)
SMOKE = (Case('tiny', 'v5e-4', 'TPU v5 lite', 4, 256, 50),)


class Sizes(NamedTuple):
  """Of one chip."""

  slots: int
  weight_bytes: float
  column_bytes: float  # keys and values of one token in all layers
  block: int  # columns of a block of the kernel
  bandwidth: float


class Cost(NamedTuple):
  """Of a rollout."""

  slots: int
  iterations: float
  weights_s: float
  columns_s: float
  prompts_s: float

  @property
  def seconds(self) -> float:
    return self.weights_s + self.columns_s + self.prompts_s


def make_spec(case: Case, attention: str) -> StepSpec:
  """The step of a case, for devices that are never computed on."""
  count = hardware.chips(case.slice_)
  devices = [sharding_report.Device(i, device_kind=case.kind) for i in range(count)]
  with tempfile.TemporaryDirectory() as folder:
    c = slices.config(folder, case.model, dict(fsdp=count), case.prompts)
    c.prompt_tokens, c.completion_tokens = PROMPT_TOKENS, case.max_tokens
    c.rollout.attention = attention
    return compile_report.make(c, devices)


def sizes(spec: StepSpec) -> Sizes:
  """What `profiling.roofline` counts for one decode iteration."""
  settings, layout = spec.rollout.decode, spec.layout
  iteration = roofline.decode(spec, device_memory.ring_bytes(spec))
  slots = iteration.rows // sharding.rows_shards(layout.mesh)
  column_bytes = iteration.cache_bytes / (slots * settings.max_tokens)
  # Keys of one layer: of the values' half, and of one of the layers.
  of_layer = column_bytes / (2 * spec.model.config.layers)
  return Sizes(
    slots,
    iteration.weight_bytes,
    column_bytes,
    decode_attention.block_columns(settings.max_tokens, int(of_layer)),
    hardware.CHIPS[layout.mesh.devices.flat[0].device_kind].memory_bandwidth,
  )


def draw_lengths(case: Case, shards: int, sigma: float, seed: int) -> np.ndarray:
  """Tokens of the completions of each chip [shards, rows]."""
  log_mean = np.log(case.mean_tokens) - sigma**2 / 2
  shape = shards, case.prompts * ROLLOUTS // shards
  drawn = np.random.default_rng(seed).lognormal(log_mean, sigma, shape)
  return drawn.round().clip(2, case.max_tokens).astype(int)


def prompt_columns(slots: int, rows: int, busy_I: np.ndarray) -> np.ndarray:
  """Of a chip, in each iteration."""
  return PROMPT_TOKENS * (np.full(len(busy_I), rows / ROLLOUTS) if slots == rows else busy_I)


def whole_rings(size: Sizes, length_SxB: np.ndarray, max_tokens: int) -> Cost:
  schedules = [decode_queue.first_in_first_out(x, size.slots) for x in length_SxB]
  iterations = max(s.iterations for s in schedules)
  prompts_I = prompt_columns(size.slots, length_SxB.shape[1], np.full(iterations, size.slots))
  columns = np.array([iterations * size.slots * max_tokens, prompts_I.sum()]) * size.column_bytes
  read = (iterations * size.weight_bytes, *columns)
  return Cost(size.slots, iterations, *(x / size.bandwidth for x in read))


def read_columns(
  size: Sizes, slots: int, length_SxB: np.ndarray, columns: decode_queue.Columns
) -> Cost:
  """With `slots` on a chip and what `columns` reads for each row."""
  schedules = [decode_queue.first_in_first_out(x, slots) for x in length_SxB]
  iterations = max(s.iterations for s in schedules)
  read_SxI = np.stack([decode_queue.columns_read(s, iterations, columns) for s in schedules])
  busy_SxI = np.stack([decode_queue.busy(s, iterations) for s in schedules])
  rows = length_SxB.shape[1]
  prompts_SxI = np.stack([prompt_columns(slots, rows, busy_I) for busy_I in busy_SxI])
  columns_SxI, prompts_SxI = read_SxI * size.column_bytes, prompts_SxI * size.column_bytes
  # The chip that reads the most in this iteration.
  worst = (columns_SxI + prompts_SxI).argmax(0), np.arange(iterations)
  read = (iterations * size.weight_bytes, columns_SxI[worst].sum(), prompts_SxI[worst].sum())
  return Cost(slots, iterations, *(x / size.bandwidth for x in read))


def measure(case: Case, sigma: float, page: int, seeds: int) -> dict[str, Cost]:
  """The mean cost of each form over the seeds."""
  rings, kernel = (sizes(make_spec(case, name)) for name in ('xla', 'ragged'))
  shards, costs = hardware.chips(case.slice_), {}
  live = decode_queue.live_blocks(case.max_tokens, kernel.block)
  paged = decode_queue.pages(page)
  for seed in range(seeds):
    length_SxB = draw_lengths(case, shards, sigma, seed)
    memory_columns = kernel.slots * case.max_tokens
    slots = decode_queue.most_slots(length_SxB, paged, memory_columns, page)
    found = {
      'whole rings': whole_rings(rings, length_SxB, case.max_tokens),
      'live columns': read_columns(kernel, kernel.slots, length_SxB, live),
      'pages, slots of the rings': read_columns(kernel, kernel.slots, length_SxB, paged),
      'pages, memory of the rings': read_columns(kernel, slots, length_SxB, paged),
    }
    for name, cost in found.items():
      costs.setdefault(name, []).append(cost)
  return {name: Cost(*np.mean(runs, axis=0)) for name, runs in costs.items()}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--seeds', type=int, default=3, help='draws of the lengths')
  parser.add_argument('--sigma', type=float, default=0.8, help='of the log of the lengths')
  parser.add_argument('--page', type=int, default=128, help='tokens')
  options = smoke.parse(parser, seeds=1)
  header = ['model, slice', 'tokens at most, in the mean', 'cache', 'slots a chip', 'iterations']
  header += ['weights, s', 'columns, s', 'prompts, s', 'all, s']
  rows = []
  for case in SMOKE if options.smoke else CASES:
    for name, cost in measure(case, options.sigma, options.page, options.seeds).items():
      counts = [f'{cost.slots:.0f}', f'{cost.iterations:,.0f}']
      seconds = [f'{s:.1f}' for s in (cost.weights_s, cost.columns_s, cost.prompts_s, cost.seconds)]
      lengths = f'{case.max_tokens:,}, {case.mean_tokens:,.0f}'
      rows.append([f'{case.model}, {case.slice_}', lengths, name, *counts, *seconds])
  print(results.table(header, rows))


if __name__ == '__main__':
  main()
