"""Values inside the layers of both halves of a step, recorded on the host while the program runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax
import numpy as np

from jaxrl_llm.learner import microbatch
from jaxrl_llm.models import attention, linear, positions
from jaxrl_llm.models.block import Block
from jaxrl_llm.rollout import ring_decode, slot_loop
from jaxrl_llm.types import ModelConfig

# Parts of a layer, in order, and the parts that each reads.
PARTS = {
  'input': (),
  'norm of attention': ('input',),
  'q': ('norm of attention',),
  'k': ('norm of attention',),
  'v': ('norm of attention',),
  'norm of q': ('q',),
  'norm of k': ('k',),
  'rotated q': ('norm of q',),
  'rotated k': ('norm of k',),
  'scores, softmax, values': ('rotated q', 'rotated k', 'v'),
  'o': ('scores, softmax, values',),
  'residual': ('o', 'input'),
  'norm of MLP': ('residual',),
  'gate': ('norm of MLP',),
  'up': ('norm of MLP',),
  'activation': ('gate', 'up'),
  'down': ('activation',),
  'output': ('down', 'residual'),
}
_WHO = 'who'
# (layer, part) → token (row, place) → its values
Table = dict[tuple[int, str], dict[tuple[int, int], np.ndarray]]


class Tape(dict):
  """Name of a part → its arrays, in the order in which they were computed."""

  def record(self, name: str, *arrays: jax.Array) -> None:
    """Records arrays of a traced function whenever it runs."""

    def keep(*values: np.ndarray) -> None:
      self.setdefault(name, []).append([np.array(x) for x in values])

    jax.debug.callback(keep, *arrays, ordered=True)


@contextlib.contextmanager
def recording(tape: Tape, config: ModelConfig) -> Iterator[None]:
  """Functions that are traced inside record their values; none of them may be inside a shard_map."""
  saved, names = [], {}

  def patch(owner, name, make):
    old = owner.__dict__[name]
    saved.append((owner, name, old))
    setattr(owner, name, make(old))

  def mix(old):
    def run(self, h, context):
      tape.record('norm of attention', h)
      names.update({id(getattr(self, name)): name for name in 'qkvo'})
      return old(self, h, context)

    return run

  def feed_forward(old):
    def run(self, h, x, expert):
      tape.record('residual', x)
      tape.record('norm of MLP', h)
      names.update({id(getattr(self, name)): name for name in ('gate', 'up', 'down')})
      return old(self, h, x, expert)

    return run

  def dense(old):
    def run(self, x):
      y, name = old(self, x), names[id(self)]
      if name == 'down':
        tape.record('activation', x)
      tape.record(name, y)
      return y

    return run

  def rotate(old):
    def run(x, *tables, **options):
      y, name = old(x, *tables, **options), 'q' if x.shape[2] == config.heads else 'k'
      tape.record(f'norm of {name}', x)
      tape.record(f'rotated {name}', y)
      return y

    return run

  def attend(old):
    def run(*inputs, **options):
      y = old(*inputs, **options)
      tape.record('scores, softmax, values', y)
      return y

    return run

  def block(old):
    def run(self, x, *inputs, **options):
      tape.record('input', x)
      y = old(self, x, *inputs, **options)
      tape.record('output', y[0])
      return y

    return run

  def decode(old):
    def run(constants, state):
      row_S, index_S = slot_loop.clipped_slots(constants, state)
      tape.record(_WHO, row_S, index_S, state.row_S < len(constants.keys_B))
      return old(constants, state)

    return run

  def packed(old):
    def run(spec, params, microbatch, noise=None):
      at = microbatch.layout
      is_own = (at.copy_NxS > 0) & ~at.is_prompt_NxS
      tape.record(_WHO, *(x.reshape(-1) for x in (at.column_row_NxS, at.place_NxS, is_own)))
      return old(spec, params, microbatch, noise)

    return run

  patch(attention.SelfAttention, 'mix', mix)
  patch(Block, '_feed_forward', feed_forward)
  patch(Block, '__call__', block)
  patch(linear.Dense, '__call__', dense)
  patch(positions, 'rotate', rotate)
  patch(attention, 'attend', attend)
  patch(ring_decode, 'decode', decode)
  patch(microbatch, 'packed_hidden_states', packed)
  try:
    yield
  finally:
    for owner, name, old in reversed(saved):
      setattr(owner, name, old)


def by_token(tape: Tape, layers: int, skipped: int) -> Table:
  """The recorded values of completion tokens; the first `skipped` passes over all layers are of prompts."""
  passes, found = tape[_WHO], {}
  for part in PARTS:
    arrays = [x for (x,) in tape[part]][skipped * layers :]
    assert len(arrays) == len(passes) * layers, (part, len(arrays), len(passes))
    for n, x in enumerate(arrays):
      row_N, place_N, is_own_N = passes[n // layers]
      x = x.reshape(len(row_N), -1)
      tokens = found.setdefault((n % layers, part), {})
      tokens |= {(row_N[i], place_N[i]): x[i] for i in np.flatnonzero(is_own_N)}
  return found


def differing(sampled: Table, learned: Table, layers: int) -> dict[str, tuple[float, float]]:
  """Of each part, over all layers: the share of values that differ, and that among tokens with equal inputs.

  Attention reads the keys and values of all earlier tokens of a completion; those of prompts are not compared.
  """
  result = {}
  tokens = [t for t in learned[0, 'input'] if t in sampled[0, 'input']]
  equal = {key: {t: (sampled[key][t] == learned[key][t]) for t in tokens} for key in learned}
  for part, inputs in PARTS.items():
    all_values, own_values = [], []
    for layer in range(layers):
      same = {t: all(equal[layer, name][t].all() for name in inputs) for t in tokens}
      for row, place in tokens:
        values = equal[layer, part][row, place]
        all_values.append(1 - values.mean())
        earlier = range(place + 1) if 'softmax' in part else [place]
        if inputs and all(same[row, j] for j in earlier):
          own_values.append(1 - values.mean())
    result[part] = float(np.mean(all_values)), float(np.mean(own_values or [np.nan]))
  return result
