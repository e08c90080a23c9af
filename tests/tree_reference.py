"""Tree rollouts in plain Python: lists of tokens, full forward passes, one row at a time, no cache.

It shares two things with the code under test: the model's forward pass, and the draw of one token from logits and a
key.
"""

from __future__ import annotations

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.models import decoder
from jaxrl_llm.rollout import sampling


def suffix_match(a, b):
  def longest(x, y):
    inside = lambda n: any(x[len(x) - n :] == y[i : i + n] for i in range(len(y) - n + 1))  # noqa: E731
    return max(n for n in range(len(x) + 1) if inside(n))

  return max(longest(a, b), longest(b, a)) / len(a)


def rouge_l(a, b):
  @functools.cache
  def lcs(i, j):
    if i == 0 or j == 0:
      return 0
    if a[i - 1] == b[j - 1]:
      return lcs(i - 1, j - 1) + 1
    return max(lcs(i - 1, j), lcs(i, j - 1))

  precision = recall = lcs(len(a), len(b)) / len(a)
  return 2 * precision * recall / (precision + recall) if precision else 0.0


def edit_distance(a, b):
  @functools.cache
  def steps(i, j):
    if i == 0 or j == 0:
      return i + j
    swap = steps(i - 1, j - 1) + (a[i - 1] != b[j - 1])
    return min(swap, steps(i - 1, j) + 1, steps(i, j - 1) + 1)

  return steps(len(a), len(b)) / len(a)


@dataclasses.dataclass
class Row:
  tokens: list
  parent: int
  born: int
  logits: list  # of next tokens since the fork, those at the fork included
  done: bool = False


def softmax(logits):
  e = np.exp(logits - logits.max())
  return e / e.sum()


@dataclasses.dataclass
class Latr:
  absolute: float
  relative: float
  ages: tuple
  suffix: float
  rouge: float
  edit: float
  limit: int

  def branch(self, row, sampled):
    p = softmax(row.logits[-1])
    first, second = np.argsort(-p, kind='stable')[:2]
    opens = p[second] > self.absolute and p[first] - p[second] < self.relative
    return int(first), [int(second)] if opens else []

  def drops(self, rows, row):
    parent = rows[row.parent]
    age = len(row.tokens) - row.born
    if row.done or parent.done or age not in self.ages:
      return False
    a, b = row.tokens[-age:], parent.tokens[-age:]
    return (
      suffix_match(a, b) > self.suffix
      or rouge_l(a, b) > self.rouge
      or edit_distance(a, b) < self.edit
    )

  def pending(self, rows, row):
    young = len(row.tokens) - row.born < max(self.ages)
    return young and not row.done and not rows[row.parent].done


@dataclasses.dataclass
class Echo:
  entropy: float
  entropy_low: float
  rise: float
  confidence: float
  width: int
  alpha: float
  beta: float
  depth: int
  top_k: int
  window: int
  tail_window: int
  floor: float
  tail: float
  drops_: int
  spike: float
  rises: int
  limit: int

  def history(self, row):
    """(H, ΔH, group confidence, tail confidence) of every distribution since the fork."""
    H, C, out = [], [], []
    for logits in row.logits:
      p = softmax(logits.astype(np.float64))
      before = H[-self.window :]
      H.append(-(p * np.log(p)).sum())
      C.append(np.sort(p)[-self.top_k :].mean())
      rise = H[-1] - np.mean(before) if before else 0.0
      out.append((H[-1], rise, np.mean(C[-self.window :]), np.mean(C[-self.tail_window :])))
    return out

  def branch(self, row, sampled):
    H, rise, group, _ = self.history(row)[-1]
    gate = H >= self.entropy and rise >= self.rise and group <= self.confidence
    if not gate or len(row.tokens) < self.depth:
      return sampled, []
    steep = self.alpha * (H - self.entropy_low) / (self.entropy - self.entropy_low)
    doubt = self.beta * (group - self.confidence) / self.confidence
    ways = int(np.clip(np.round(1 + steep - doubt), 1, self.width))
    likely = [int(t) for t in np.argsort(-row.logits[-1], kind='stable') if t != sampled]
    return sampled, likely[: ways - 1]

  def drops(self, rows, row):
    history = self.history(row)
    if row.done or len(history) < 2:
      return False
    falls = rises = 0
    for (_, _, _, before), (_, rise, _, tail) in zip(history, history[1:], strict=False):
      falls = falls + 1 if tail < before else 0
      rises = rises + 1 if rise > 0 else 0
    _, rise, _, tail = history[-1]
    return (
      min(group for _, _, group, _ in history) < self.floor
      or (falls >= self.drops_ and tail <= self.tail)
      or (rises >= self.rises and rise > self.spike)
    )

  def pending(self, rows, row):
    return not row.done


class Reference:
  """Grows one group after another; `events` counts forks, drops and other events."""

  def __init__(self, model, params, prompts, keys_B, spec):
    self.prompts, self.keys_B, self.spec = prompts, keys_B, spec
    self.events = collections.Counter()
    width = prompts.tokens_PxL.shape[1] + spec.max_tokens
    forward = jax.jit(lambda tokens, mask: decoder.forward(model, params, tokens, mask)[0])
    draw = jax.jit(
      lambda logits, key, at: sampling.sample(
        logits[None], sampling.uniforms(key[None], at), spec.temperature
      )[0][0]
    )
    self._draw = lambda logits, row, at: int(draw(jnp.asarray(logits), keys_B[row], at))

    def logits(p, tokens):
      row = [*prompts.tokens_PxL[p, : prompts.length_P[p]], *tokens]
      padded = np.zeros((1, width), np.int32)
      padded[0, : len(row)] = row
      return np.asarray(forward(padded, np.arange(width)[None] < len(row))[len(row) - 1])

    self._logits = logits

  def _ended(self, tokens):
    return tokens[-1] in self.spec.end_ids or len(tokens) == self.spec.max_tokens

  def group(self, p, rule):
    rows, base = {0: Row([], 0, 0, [])}, p * self.spec.rollouts
    while self._iterate(p, rows, rule):
      pass
    for g in range(self.spec.rollouts):
      row = rows.setdefault(g, Row([], g, 0, []))
      self.events['from the prompt'] += not row.tokens
      while not row.done:
        at = len(row.tokens)
        row.tokens.append(self._draw(self._logits(p, row.tokens), base + g, at))
        row.done = self._ended(row.tokens)
    return rows

  def _iterate(self, p, rows, rule):
    """Adds one token to every running row; returns whether the group goes on growing."""
    G, events = self.spec.rollouts, self.events
    running, requests, next_tokens = [g for g in sorted(rows) if not rows[g].done], [], {}
    for g in running:
      row = rows[g]
      row.logits.append(self._logits(p, row.tokens))
      drawn = self._draw(row.logits[-1], p * G + g, len(row.tokens))
      next_tokens[g], more = rule.branch(row, drawn)
      requests += [(k, g, token) for k, token in enumerate(more)]
    free = [g for g in range(G) if g not in rows]
    events['refused'] += max(len(requests) - len(free), 0)
    events['at the first token'] += bool(requests) and not rows[0].tokens
    children = {
      free_row: Row([*rows[g].tokens, token], g, len(rows[g].tokens), rows[g].logits[-1:])
      for (_, g, token), free_row in zip(sorted(requests), free, strict=False)
    }
    events['forks'] += len(children)
    for g in running:
      rows[g].tokens.append(next_tokens[g])
    rows |= children
    for row in rows.values():
      row.done = row.done or self._ended(row.tokens)
    self._prune(rows, rule)
    return not self._ends(rows, rule)

  def _prune(self, rows, rule):
    children = [g for g, row in rows.items() if row.parent != g]
    gone = {g for g in children if rule.drops(rows, rows[g])}
    direct = len(gone)
    while more := {g for g in children if rows[g].parent in gone} - gone:
      gone |= more
    self.events['drops'] += len(gone)
    self.events['descendants'] += len(gone) - direct
    for g in gone:
      del rows[g]

  def _ends(self, rows, rule):
    running = [row for row in rows.values() if not row.done]
    waits = any(rule.pending(rows, r) for g, r in rows.items() if r.parent != g)
    full = len(rows) == self.spec.rollouts and not waits
    long = any(len(row.tokens) >= rule.limit for row in running)
    why = 'full' if full else 'limit' if long else '' if running else 'all done'
    self.events[why] += bool(why)
    return bool(why)
