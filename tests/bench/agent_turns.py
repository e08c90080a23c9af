"""Episodes a second with many turns: `environment.batching` lockstep against turns, beside a bound.

python -m tests.bench.agent_turns [--prompts 32 --rollouts 8 --width 64 --layers 2 --slots 0 --repeats 3] [--plot FILE]
[--smoke]
Episodes of 4 to 16 turns whose lengths are geometric, with a mean of about 24 tokens: a model with random weights, of
which four tokens end a turn. The steps of the environments last a log-normal time (σ = 1) whose mean is the decoding
of a turn, and each episode has a worker of its own; the same (episode, turn) takes the same time in all cases. Both
sample the same tokens, but for rounding. The bound is the slowest episode alone: its tokens at the time of a decode
iteration of all rows, and its environment. Compilation is not counted, and the best of the repeats is. --plot draws
when the device computes in these.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import threading
import time

os.environ.setdefault('JAX_PLATFORMS', 'cpu')

import jax
import numpy as np

from jaxrl_llm.config import loading as configs
from jaxrl_llm.distributed import sharding
from jaxrl_llm.learner import compile as programs
from jaxrl_llm.learner import state as train_state
from jaxrl_llm.learner import turn_programs
from jaxrl_llm.rollout.turn_decode import CallLimits
from jaxrl_llm.runner import host_step, multi_turn, setup, turn_batching
from jaxrl_llm.types import Prompts, Rollout
from tests.bench.lib import latency_pool, plots, smoke

ENDS = (0, 1, 2, 3)  # of about 100 tokens


class Timeline:
  """Seconds, since it began, between which the device computed."""

  def __init__(self):
    self._began, self._threads, self.spans = time.perf_counter(), [], []

  def watch(self, call, *arguments):
    """The results of a call, whose span lasts until they are there."""
    start, results = time.perf_counter(), call(*arguments)

    def wait():
      jax.block_until_ready(results)
      self.spans.append((start - self._began, time.perf_counter() - self._began))

    self._threads.append(threading.Thread(target=wait))
    self._threads[-1].start()
    return results

  def end(self) -> float:
    """Seconds from the beginning to now, once all spans are known."""
    took = time.perf_counter() - self._began
    for thread in self._threads:
      thread.join()
    return took

  def idle(self, took: float) -> float:
    """The share of the seconds in which the device did not compute."""
    return 1 - sum(end - start for start, end in self.spans) / took


class WatchedDecoder(turn_batching.Decoder):
  """Tells a timeline when the device computes."""

  def __init__(self, timeline: Timeline, *arguments):
    super().__init__(*arguments)
    self._timeline = timeline

  def begin(self, rollout):
    return self._timeline.watch(super().begin, rollout)

  def advance(self, rollout, row_S, limits):
    return self._timeline.watch(super().advance, rollout, row_S, limits)


def job(options: argparse.Namespace):
  """The run whose rollouts are timed."""
  c = configs.default()
  c.model, c.mode = 'scratch', 'split'
  heads = max(1, options.width // 32)
  c.scratch.update(width=options.width, layers=options.layers, heads=heads, kv_heads=heads)
  c.scratch.update(mlp=4 * options.width, max_tokens=options.tokens + 16)
  c.prompts, c.rollouts = options.prompts, options.rollouts
  c.prompt_tokens, c.completion_tokens = 12, options.tokens
  c.data.source, c.data.size, c.data.chat = 'digits', 2 * options.prompts, False
  c.data.tasks = (dict(name='copy', min_length=1, max_length=3),)
  c.environment.fn, c.environment.judge, c.evaluation.prompts = 'guess', 'environment', 0
  c.environment.turns, c.rollout.slots = 16, options.slots
  c.environment.batching = dict(fn='turns', ready=options.ready, iterations=options.iterations)
  context = setup.build_context(c, sharding.make_mesh(c.mesh, jax.devices()[:1]))
  context.episodes.tokenizer = context.models.policy.tokenizer._replace(end_ids=ENDS)
  rollout = context.spec.rollout
  rollout = rollout._replace(decode=rollout.decode._replace(end_ids=ENDS))
  return context._replace(spec=context.spec._replace(rollout=rollout))


class Rollouts:
  """The same rollout by both ways of batching."""

  def __init__(self, context, turns: tuple[int, int]):
    self.context, self._turns = context, turns
    self._sample = programs.compile_sample(context.spec)
    self._programs = turn_programs.compile_turns(context.spec)
    self._state = train_state.init_state(context.spec, context.models.policy.params)
    # A second choice for the same step may differ.
    self._choice = host_step.choose(context, 0)

  def open(self, mean_s: float):
    """New episodes: their prompts, and what a call gets besides."""
    make = lambda: latency_pool.Speaker(self._turns)  # noqa: E731
    pool = latency_pool.LatencyPool(self.context.config.environment, make, mean_s)
    self.context.episodes.environments = pool
    return self.inputs()

  def inputs(self):
    """What a call gets, with the same prompts each time."""
    return host_step.build_inputs(self.context, 0, self._choice)

  def lockstep(self, timeline: Timeline, prompts: Prompts, begun: Rollout, draft, cap):
    """Rollout and metrics of one call a turn."""

    def sample(begun):
      call = self._sample, self._state, (), prompts, begun, draft, cap
      rollout, metrics, _ = timeline.watch(*call)
      return sharding.fetch(rollout), metrics

    episodes, rows = self.context.episodes, self.context.tables.train.rows_of(prompts)
    return episodes.play(sample, prompts, rows, begun, multi_turn.Limits(int(cap), episodes.turns))

  def turns(self, timeline: Timeline, prompts: Prompts, begun: Rollout, draft, cap):
    """Rollout and metrics of batched turns."""
    episodes, rows = self.context.episodes, self.context.tables.train.rows_of(prompts)
    limits = multi_turn.Limits(int(cap), episodes.turns)
    slots = self.context.spec.rollout.decode.slots or len(begun.length_B)
    play = turn_batching.Play(episodes, prompts, rows, begun, limits, slots)
    ready = episodes.batching.ready or max(1, slots // 4)
    decoder = WatchedDecoder(timeline, self._programs, self._state, prompts, cap)
    return play.run(decoder, CallLimits(ready, episodes.batching.iterations))

  def timed(self, name: str, mean_s: float):
    """(seconds, timeline, rollout, metrics)."""
    prompts, *more = self.open(mean_s)
    timeline = Timeline()
    rollout, metrics = getattr(self, name)(timeline, prompts, *more)
    return timeline.end(), timeline, rollout, metrics

  def bound_s(self, rollout: Rollout, iteration_s: float) -> float:
    """The slowest episode if it never waited for another one."""
    pool, number_BxT = self.context.episodes.environments, rollout.turns.number_BxT
    prompts, *_ = self.inputs()
    seconds = []
    for b, key in enumerate(multi_turn.row_keys(prompts, rollout)):
      steps = range(1, number_BxT[b].max() + 2)
      waits_s = sum(pool.latency_s(key, turn) for turn in steps)
      seconds.append((number_BxT[b] >= 0).sum() * iteration_s + waits_s)
    return max(seconds)


def encoded_by_lockstep(rollout: Rollout, prompt_tokens: int) -> int:
  """Tokens that lockstep encodes: every call the prompts, and what each row that goes on holds."""
  number_BxT = rollout.turns.number_BxT
  total = 0
  for b in range(len(number_BxT)):
    for turn in range(1, number_BxT[b].max() + 1):
      total += int(np.flatnonzero(number_BxT[b] == turn)[0]) - 1
  return total + prompt_tokens * int(number_BxT.max() + 1)


def equal_rows(a: Rollout, b: Rollout) -> float:
  """The share of rows with equal tokens; a draw at the border of two tokens may go either way by rounding.

  Raises AssertionError where log-probabilities before the first such draw of a row differ by more than rounding.
  """
  differs_BxT = a.tokens_BxT != b.tokens_BxT
  agreed_BxT = ~np.maximum.accumulate(differs_BxT, axis=1)
  assert (np.abs(a.logp_BxT - b.logp_BxT)[agreed_BxT] < 1e-4).all()
  return float((~differs_BxT.any(1)).mean())


def main(options: argparse.Namespace) -> None:
  context = job(options)
  rollouts = Rollouts(context, (4, 16) if not options.smoke else (2, 4))
  # The first one compiles.
  runs = [rollouts.timed('turns', 0.0) for _ in range(1 + options.repeats)][1:]
  seconds, _, warm, metrics = min(runs, key=lambda run: run[0])
  iteration_s = seconds / metrics['generate/rounds']
  sampled = (warm.turns.number_BxT >= 0).sum()
  count = int((warm.turns.number_BxT.max(1) + 1).sum())
  mean_s = sampled / count * iteration_s
  rollouts.timed('lockstep', 0.0)
  best, found = {}, {}
  for _ in range(options.repeats):
    for name in ('lockstep', 'turns'):
      took, timeline, *found[name] = rollouts.timed(name, mean_s)
      if name not in best or took < best[name][0]:
        best[name] = took, timeline
  same = equal_rows(found['lockstep'][0], found['turns'][0])
  rollout, metrics = found['turns']
  bound_s, episodes = rollouts.bound_s(rollout, iteration_s), len(rollout.length_B)
  prompts, *_ = rollouts.inputs()
  new = metrics['environment/observation_tokens'] + float(prompts.length_P.sum())
  encoded = dict(
    lockstep=encoded_by_lockstep(rollout, int(prompts.length_P.sum())),
    turns=metrics['environment/encoded_tokens'],
  )
  print(
    f'{episodes} episodes, {count / episodes:.1f} turns of {sampled / count:.1f} tokens; an iteration takes '
    f'{1e3 * iteration_s:.2f} ms, an environment {1e3 * mean_s:.0f} ms; load {os.getloadavg()[0]:.1f}\n'
  )
  print(
    '| batching | seconds | episodes a second | share of the bound | device idle | encoded per new token |'
  )
  print('|---|---|---|---|---|---|')
  for name, (took, timeline) in best.items():
    print(
      f'| {name} | {took:.2f} | {episodes / took:.1f} | {bound_s / took:.2f} | {timeline.idle(took):.2f} | '
      f'{encoded[name] / new:.2f} |'
    )
  ratio = best['lockstep'][0] / best['turns'][0]
  spilled = metrics['environment/spilled']
  print(
    f'\nturns over lockstep: {ratio:.2f}; rows with equal tokens {same:.3f}; spilled {spilled:.0f}'
  )
  if options.plot:
    draw(options.plot, best)


def draw(path: pathlib.Path, best: dict[str, tuple[float, Timeline]]) -> None:
  """When the device computes, by batching."""
  with plots.svg(path) as (figure, (axes,)):
    figure.set_figheight(1.8)
    for row, (took, timeline) in enumerate(best.values()):
      spans = [(start, end - start) for start, end in timeline.spans]
      axes.broken_barh(spans, (row - 0.3, 0.6))
      axes.text(took, row, f' idle {timeline.idle(took):.0%}', va='center')
    axes.set_yticks(range(len(best)), list(best))
    axes.set(xlabel='seconds; the device computes in the bars')
    axes.margins(x=0.12)


if __name__ == '__main__':
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--prompts', type=int, default=32)
  parser.add_argument('--rollouts', type=int, default=8)
  parser.add_argument('--width', type=int, default=64)
  parser.add_argument('--layers', type=int, default=2)
  parser.add_argument('--tokens', type=int, default=768)
  parser.add_argument('--slots', type=int, default=0, help='rows on the device; 0: all')
  parser.add_argument('--ready', type=int, default=0)
  parser.add_argument('--iterations', type=int, default=8)
  parser.add_argument('--repeats', type=int, default=3)
  parser.add_argument('--plot', type=pathlib.Path, help='an SVG file; needs the extra plot')
  main(smoke.parse(parser, prompts=2, rollouts=4, width=16, layers=1, tokens=160, repeats=1))
