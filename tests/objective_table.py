"""Every method once: its settings, and its loss as the paper writes it, from nothing of the package.

A loss takes the log-probs `x` that the gradient is taken of and a frozen copy `s` for what the paper detaches, so that
autodiff and finite differences see the same function. `d` holds the data, see `data`.
"""

from __future__ import annotations

import itertools
import math
import types
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxrl_llm import objective
from jaxrl_llm.config import loading as configs
from jaxrl_llm.types import Batch, Prompts, Rollout

P, G, T = 4, 4, 6
B = P * G


class Row(NamedTuple):
  """A line of the table."""

  settings: dict
  loss: Callable  # (x, s, d) → scalar
  on_policy: bool = True  # c = denominator · A where all policies agree
  value: bool = True  # the logged loss is the written one, and not only its gradient


def settings(**changes):
  """`config.objective` with `changes`; for `advantage` and `aggregate` a name will do."""
  c = configs.default().objective
  for name, value in changes.items():
    c[name] = dict(fn=value) if isinstance(value, str) else value
  return c


def data(seed=0, drift=0.3, mismatch=0.2):
  """Random lengths, graded rewards, one group all right, four policies: x, old, behavior, reference."""
  r = np.random.default_rng(seed)
  length = r.integers(1, T + 1, B).astype(np.int32)
  correct = r.integers(0, 2, B).astype(np.float64)
  correct[G : 2 * G] = 1
  correct[:2] = [1, 0]
  reward = correct + 0.3 * r.random(B)
  x = np.log(r.uniform(0.05, 0.95, (B, T)))
  old = np.minimum(x + drift * r.normal(size=(B, T)), -1e-3)
  behavior = np.minimum(old + mismatch * r.normal(size=(B, T)), -1e-3)
  if not drift:
    old = x
  if not mismatch:
    behavior = old
  mask = (np.arange(T)[None] < length[:, None]).astype(np.float64)
  return types.SimpleNamespace(
    x=x,
    old=old,
    behavior=behavior,
    reference=x + 0.5 * r.normal(size=(B, T)),
    entropy=r.uniform(0, 0.35, (B, T)),
    reward=reward,
    correct=correct,
    length=length,
    mask=mask,
    group=np.arange(B) // G,
    values=r.normal(size=(B, T)),
    process=0.3 * r.normal(size=(B, T)),
    deviation=np.random.default_rng((seed, 6)).uniform(0, 2, (B, T)),
    age=r.integers(1, 5, (B, T)),
    moved=np.ones((B, T), int),
    step=np.full(B, 64),
    norm=r.uniform(0.5, 3, B),  # of the gradient of a row
    confidence=r.uniform(0.01, 0.2, (B, T)),  # five tokens share 1
    collision=np.exp(2 * x) + (1 - np.exp(x)) ** 2 * r.uniform(0.2, 1, (B, T)),
    parts=np.stack([correct, 9 * r.random(B)], 1),
    context=np.repeat([0, -1, 1, 0], G),
    tokens=np.random.default_rng((seed, 7)).integers(0, 2, (B, T)),
  )


def signal(method, d):
  """The signal of the method's auxiliary model."""
  return getattr(d, method.auxiliary_model.signal_kind) if method.auxiliary_model else None


def policies(method, d):
  """Log-probs of other policies, as far as a method needs them."""
  return objective.OtherPolicies(
    d.old if method.needs_old else None, d.reference if method.needs_reference else None
  )


def known(method, d):
  """Arrays of `Targets` that the update prepares for a method that needs them."""
  return policies(method, d)._asdict() | dict(
    age_BxT=d.age if method.needs_versions else None,
    batch_steps_BxT=d.moved if method.needs_versions else None,
    step_B=d.step if method.needs_step else None,
  )


def leverage(d):
  """log(w·n) of each row, as the update computes it."""
  real = d.mask > 0
  return np.log(d.norm) + np.where(
    real, np.where(real, d.x, 0) - np.where(real, d.behavior, 0), 0
  ).sum(1)


def batch(d):
  rows, columns = d.mask.shape
  rollout = Rollout(
    np.asarray(getattr(d, 'tokens', np.zeros((rows, columns))), np.int32),
    d.behavior,
    d.length,
    np.ones(rows, np.int8),
    np.zeros((rows, columns), np.int32),
    np.ones(rows),
    np.zeros((rows, 0)),
  )
  groups = rows // G
  prompts = Prompts(
    np.zeros((groups, 3), np.int32),
    np.full(groups, 3, np.int32),
    *[np.arange(groups)] * 2,
    np.zeros(groups),
  )
  prompts = prompts._replace(context_P=d.context[::G])
  return Batch(prompts, rollout, d.reward, d.correct, parts_BxK=d.parts)


def node_advantage(d):
  """Of each token: (R − mean) / std among the beginnings of rows of its group that end there, shared by their rows."""
  out = np.zeros((B, T))
  for g, t in itertools.product(range(P), range(T)):
    nodes = {}
    for b in range(g * G, (g + 1) * G):
      if t < d.length[b]:
        nodes.setdefault(tuple(d.tokens[b, : t + 1]), []).append(b)
    rewards = [d.reward[rows].mean() for rows in nodes.values()]
    if len(nodes) < 2 or np.std(rewards, ddof=1) < 1e-6:
      continue
    for reward, rows in zip(rewards, nodes.values(), strict=True):
      out[rows, t] = (reward - np.mean(rewards)) / (np.std(rewards, ddof=1) + 1e-8) / len(rows)
  return out


# Advantages, group by group, as [B, 1].


def by_group(fn):
  def advantage(d):
    out = np.zeros(B)
    for g in range(P):
      rows = np.arange(g * G, (g + 1) * G)
      out[rows] = fn(d.reward[rows], d.length[rows])
    return out[:, None]

  return advantage


gz = by_group(lambda r, n: (r - r.mean()) / (r.std(ddof=1) + 1e-6))
gm = by_group(lambda r, n: r - r.mean())
loo = by_group(lambda r, n: np.array([x - np.delete(r, i).mean() for i, x in enumerate(r)]))
relative = by_group(lambda r, n: r / r.mean() - 1)
shifted = by_group(lambda r, n: r - (r.mean() - 0.1))
exp_weighted = by_group(lambda r, n: (r - r.mean()) * np.exp((r - r.mean()) / 0.5))


@by_group
def balanced(r, n):
  """The mean over all choices of as many rows below the mean as there are others."""
  good, bad = np.flatnonzero(r >= r.mean()), np.flatnonzero(r < r.mean())
  draws = [*itertools.combinations(bad, min(len(good), len(bad)))]
  out = np.zeros(len(r))
  for chosen in draws:
    kept = [*good, *chosen]
    out[kept] += (r[kept] - r[kept].mean()) / len(draws)
  return out


@by_group
def amplified(r, n):
  """A half from 1.15 up, else half the difference from the mean, and three times that above it."""
  return np.array([1.0 if x >= 1.15 else max(x - r.mean(), 3 * (x - r.mean())) for x in r]) / 2


opmd = by_group(lambda r, n: (r - 2 * np.log(np.exp(r / 2).mean())) / 3)
weighted = by_group(lambda r, n: r - (r * n).sum() / n.sum())
median = by_group(lambda r, n: (r - np.median(r)) / (np.median(np.abs(r - np.median(r))) + 1e-3))


def pass_at_k(r, n, k=2):
  right, c = r > 0.5, int((r > 0.5).sum())
  rho = 1 - math.comb(G - c, k) / math.comb(G, k)
  others = math.comb(G - c - 1, k - 1) / math.comb(G - 1, k - 1) if c < G else 0
  return np.where(right, 1 - rho, 1 - rho - others) / (np.sqrt(rho * (1 - rho)) + 1e-6)


def best_margin(r, n):
  first, second = np.sort(r)[::-1][:2]
  return np.where(r == first, (first - second) / (r.std(ddof=1) + 1e-6), 0)


greedy = by_group(lambda r, n: r - r[0])


def gpg(d):
  return B / np.count_nonzero(d.reward) * gm(d) / 2


def otb(d):
  out = np.zeros((B, T))
  for g in range(P):
    rows = range(g * G, (g + 1) * G)
    for t in range(T):
      there = [b for b in rows if t < d.length[b]]
      energy = 1 - 2 * np.exp(d.x) + d.collision
      path = np.array([energy[b, : t + 1].sum() for b in there])
      if there:
        out[there, t] = d.reward[there] - (path * d.reward[there]).sum() / (path.sum() + 1e-8)
  return out


def gb(d):
  return gm(d) / (d.reward.std(ddof=1) + 1e-4)


def gdpo(d):
  total = np.zeros(B)
  for part in d.parts.T:
    for g in range(P):
      rows = np.arange(g * G, (g + 1) * G)
      total[rows] += (part[rows] - part[rows].mean()) / (part[rows].std(ddof=1) + 1e-4)
  return ((total - total.mean()) / (total.std(ddof=1) + 1e-4))[:, None]


def adora(d):
  out = gz(d)[:, 0]
  for g in range(P):
    rows = np.arange(g * G, (g + 1) * G)
    right, wrong = rows[d.correct[rows] == 1], rows[d.correct[rows] == 0]
    wrong = wrong[d.length[wrong] < 6]
    longest = d.length[right].max() if len(right) else -np.inf
    if not longest > (d.length[wrong].mean() if len(wrong) else -np.inf):
      out[rows] *= 0.1
  return out[:, None]


def dars(weight):
  def advantage(r, n):
    p = r.mean()
    return (r - p) * (min(weight(p), 1.2) if p < 0.5 else 1)

  return by_group(advantage)


def whiten(a, d):
  tokens = np.concatenate([np.full(n, v) for v, n in zip(a.ravel(), d.length, strict=True)])
  return (a - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + 1e-8)


# Credits of tokens, as [B, T].


def tokens_whitened(a, d):
  seen = a[d.mask > 0]
  return (a - seen.mean()) / np.sqrt(seen.var(ddof=1) + 1e-8) * d.mask


def gae(d, discount=0.97, trace=0.9, cost=None):
  out = np.zeros(d.mask.shape)
  for b, n in enumerate(d.length):
    ahead = 0.0
    for t in reversed(range(n)):
      reward, following = (d.reward[b], 0.0) if t == n - 1 else (0.0, d.values[b, t + 1])
      reward -= 0 if cost is None else cost[b, t]
      ahead = reward + discount * following - d.values[b, t] + discount * trace * ahead
      out[b, t] = ahead
  return out


def prime(d):
  out = np.zeros(d.mask.shape)
  ahead = np.cumsum((d.process * d.mask)[:, ::-1], axis=1)
  q = d.process / (np.abs(ahead).max() + 1e-6)
  for b, n in enumerate(d.length):
    others = [o for o in range(B) if o // G == b // G and o != b]
    mean = np.mean([q[o, : d.length[o]].mean() for o in (b, *others)])
    gain = d.reward[b] - d.reward[others].mean()
    out[b, :n] = 2 * G / (G - 1) * np.cumsum((q[b, :n] - mean)[::-1])[::-1] + 5 * gain
  return tokens_whitened(out, d)


def oprl(d):
  total = (d.process * d.mask).sum(1)
  step = by_group(lambda s, n: (s - s.mean()) / (s.std(ddof=1) + 1e-6))
  return (gz(d) + 0.7 * step(types.SimpleNamespace(reward=total, length=d.length))) * d.mask


def rlfr(d):
  out = np.zeros(d.mask.shape)
  for b, n in enumerate(d.length):
    read = d.deviation[b, : n - 1]
    share = (read - read.min()) / np.ptp(read) if n > 2 else 0 * read
    largest = sorted(share, reverse=True)[:2]
    counted = [s if s > 0.4 and s in largest else 0.0 for s in share]
    for t in range(n):
      out[b, t] = gz(d)[b, 0] - 0.3 * sum(counted[t:])
  return out


def raw(d):
  return d.reward[:, None] - 0.5


# Shaped rewards, and the advantages of the rows that have them, as [B, 1].


def of_reward(fn):
  return lambda d: gz(types.SimpleNamespace(**(vars(d) | dict(reward=fn(d)))))


def over(n):
  return max(n - (T - 4), 0) / 4


def overlong(d):
  return d.reward - 0.5 * np.array([over(n) for n in d.length])


def apriel(d):
  out = d.reward.copy()
  for b, n in enumerate(d.length):
    solved = d.correct[b // G * G : b // G * G + G].mean()
    weight = 1 if n == T else solved**2 if d.correct[b] else 0.5
    out[b] -= weight * over(n)
  return out


def grpo_lambda(d):
  out, solved = d.reward.copy(), d.correct.reshape(P, G).mean(1)
  least = np.sort(solved)[-int(np.ceil(0.4 * P))]
  for g in np.flatnonzero(solved >= least):
    rows = np.arange(g * G, (g + 1) * G)
    right = rows[d.correct[rows] == 1]
    if len(right):
      z = (d.length[right] - d.length[right].mean()) / (d.length[right].std() + 1e-4)
      out[right] -= 0.7 / (1 + np.exp(-z))
  return out


def penalty(d, value=lambda x: x):
  return 0.3 * np.where(d.mask > 0, value(d.behavior - d.reference), 0)


def penalized(d):
  return d.reward - penalty(d).sum(1)


def to_go(d, discount=0.9):
  """Discounted returns of the reward at the last token and of the penalties."""
  out = np.zeros(d.mask.shape)
  for b, n in enumerate(d.length):
    for t in range(n):
      out[b, t] = discount ** (n - 1 - t) * d.reward[b]
      out[b, t] -= sum(discount ** (j - t) * penalty(d)[b, j] for j in range(t, n))
  return out


def speciarl(d):
  out = np.zeros(B)
  for g in range(P):
    rows = np.arange(g * G, (g + 1) * G)
    out[rows] = (d.reward[rows] == d.reward[rows].max()) * (d.reward[rows].max() > 0.1)
  return np.where(d.reward < 0.1, d.reward, out)


def fimi(d):
  x = d.length / d.length.max()
  basis = np.stack([np.ones(B), x, x**2], 1)
  # Least squares with a ridge are those of a taller matrix.
  tall = np.concatenate([basis, np.sqrt(1e-6 * B) * np.eye(3)])
  fit = basis @ np.linalg.lstsq(tall, np.append(d.reward, np.zeros(3)), rcond=None)[0]
  return d.reward - 0.7 * (fit - fit.mean())


# Denominators, as [B, T].


def unled(d):
  """The token mean without the first row of each group."""
  mask = d.mask * (np.arange(B) % G > 0)[:, None]
  return mask / mask.sum()


def tok(d):
  return d.mask / d.mask.sum()


def seq(d):
  return d.mask / d.mask.sum(1, keepdims=True) / B


def fix(d):
  return d.mask / (B * T)


def total(d):
  return d.mask / B


def prm(d):
  tokens = np.repeat(d.mask.sum(1).reshape(P, G).sum(1), G)[:, None]
  return d.mask / tokens / P


def mixed(d):
  """The token mean over groups whose rewards differ."""
  keep = np.repeat(np.ptp(d.reward.reshape(P, G), axis=1) > 1e-6, G)[:, None]
  return d.mask * keep / (d.mask * keep).sum()


# Losses.


def mean(x, d):
  return (x * d.mask).sum(1, keepdims=True) / d.mask.sum(1, keepdims=True)


def ppo(low=0.2, high=0.2, adv=gz, agg=seq, rho=None, dual=None):
  def loss(x, s, d):
    a, r = adv(d), jnp.exp(x - (d.old if rho else d.behavior))
    q = jnp.minimum(r * a, jnp.clip(r, 1 - low, 1 + high) * a)
    if dual:
      q = jnp.where(a < 0, jnp.maximum(q, dual * a), q)
    return -(agg(d) * (rho(d) if rho else 1) * q).sum()

  return loss


def reinforce(adv, agg, weight=lambda s, d: 1.0):
  """Σ sg(weight)·A·ℓ."""
  return lambda x, s, d: -(agg(d) * weight(s, d) * adv(d) * x).sum()


def rho(d):
  return np.exp(d.old - d.behavior)


def row_rho(d):
  return np.exp(((d.old - d.behavior) * d.mask).sum(1, keepdims=True))


def geo_rho(d):
  return np.exp(mean(d.old - d.behavior, d))


def gspo(x, s, d):
  a, r = gz(d)[:, 0], jnp.exp(mean(x - d.behavior, d))[:, 0]
  return -jnp.minimum(r * a, jnp.clip(r, 1 - 3e-2, 1 + 4e-2) * a).mean()


def luspo(x, s, d):
  a, r = gz(d)[:, 0], jnp.exp(mean(x - d.behavior, d))[:, 0]
  return -(d.length * jnp.minimum(r * a, jnp.clip(r, 0.8, 1.2) * a)).mean()


def minpro(x, s, d):
  a, value = gz(d), 0.0
  for b in range(B):
    for t in range(d.length[b]):
      least = min((np.exp(s[b, i] - d.behavior[b, i]) for i in range(t)), default=1.0)
      r = jnp.exp(x[b, t] - d.behavior[b, t]) * least
      value += jnp.minimum(r * a[b, 0], jnp.clip(r, 0.8, 1.2) * a[b, 0])
  return -value / d.mask.sum()


def bapo(x, s, d):
  a, r = gz(d), np.exp(s - d.behavior)
  low, high = 0.6, 1.2

  def gains():
    c = np.where(a > 0, a * np.minimum(r, high), a * np.maximum(r, low)) * d.mask
    return c[c > 0].sum() / -c[c < 0].sum()

  while gains() < 1.0 and (low < 0.8 - 1e-9 or high < 2 - 1e-9):
    if low < 0.8 - 1e-9:
      low += 0.05
    else:
      high += 0.05
  return ppo(1 - low, high - 1, agg=tok, dual=3.0)(x, s, d)


def harmful(s, d):
  a, r = gz(d), np.exp(s - d.behavior)
  return (((a > 0) & (r > 1)) | ((a < 0) & (r < 1))) & (d.mask > 0)


def m2po(x, s, d):
  square, level = ((s - d.behavior) ** 2)[harmful(s, d)], 0.0
  for value in sorted(square):
    if np.minimum(square, value).mean() < 0.02:
      level = value
  tau = np.sqrt(level) * (1 - 1e-9) if square.mean() > 0.02 else np.inf
  return ppo(1 - min(np.exp(-tau), 0.9), max(np.exp(tau), 1.1) - 1, agg=tok)(x, s, d)


def m2po_mask(x, s, d):
  keep, chosen = np.ones_like(s), harmful(s, d)
  while ((s - d.behavior) ** 2)[chosen].mean() > 0.04:
    worst = np.argmax(np.where(chosen, (s - d.behavior) ** 2, -1))
    chosen.ravel()[worst], keep.ravel()[worst] = False, 0
  return -(tok(d) * keep * jnp.exp(x - d.behavior) * gz(d)).sum()


def rho_mask(d):
  keep = d.mask > 0
  while ((d.old - d.behavior) ** 2)[keep].mean() > 0.02:
    keep.ravel()[np.argmax(np.where(keep, (d.old - d.behavior) ** 2, -1))] = False
  return keep


def ring(s, d):
  a, r = gm(d), np.exp(s - d.behavior)
  return (r >= 0.8) & (r <= 1.2) | np.where(a > 0, r <= 0.6, r >= 1.5)


def two_side(s, d):
  r = np.exp(s - d.behavior)
  return (r >= 1 / 1.3) & (r <= 1.3)


def one_side(s, d):
  a, r = gm(d), np.exp(s - d.behavior)
  return np.where(a > 0, r <= 1.2, r >= 0.8)


def variation(s, d):
  gap, a = np.exp(s) - np.exp(d.behavior), gm(d)
  drop = ((gap > 0.1) & (a > 0)) | ((gap < -0.1) & (a < 0))
  return ~drop * np.minimum(np.exp(s - d.behavior), 20)


def bernoulli(s, d):
  p, q, a = np.exp(d.behavior), np.exp(s), gm(d)
  kl = p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))
  drop = (kl > 0.02) & (np.sign(q - p) == np.sign(a))
  return ~drop * np.minimum(q / p, 20)


def remix(x, s, d):
  a, v, center = gz(d), jnp.exp(x - d.behavior), rho(d)
  clipped = jnp.minimum(v * a, jnp.clip(v, center - 0.2, center + 0.2) * a)
  share = 1 - 0.1 * np.ceil((64 - 50) / 10)
  before = jnp.exp(d.old - x) - (d.old - x) - 1
  return -(tok(d) * (clipped - 0.05 * (share * k3(x, s, d) + (1 - share) * before))).sum()


def unsure(d, multiply, add):
  def standard(v):
    seen = v[d.mask > 0]
    return (v - seen.mean()) / np.sqrt(seen.var(ddof=1) + 1e-8)

  score = np.clip(standard(d.entropy) + standard(1 - d.confidence), -1.5, 1.5)
  off = score.copy()
  for g in range(P):
    rows = slice(g * G, (g + 1) * G)
    off[rows] -= score[rows][d.mask[rows] > 0].mean()
  return gz(d) * (1 + multiply * score) + add * off


def confidence_clip(x, s, d, a=None):
  a, value = gz(d) * d.mask if a is None else a, 0.0
  for b in range(B):
    n = d.length[b]
    sure = d.confidence[b, max(n - 3, 0) : n].mean()
    eps = 0.05 + 0.15 / (1 + np.exp(-4 * (1 - sure)))
    r = jnp.exp(x[b, :n] - d.behavior[b, :n])
    value += jnp.minimum(r * a[b, :n], jnp.clip(r, 1 - eps, 1 + eps) * a[b, :n]).sum()
  return -value / d.mask.sum()


def echo(x, s, d):
  return confidence_clip(x, s, d, unsure(d, 0.2, 0.3))


def sapo(x, s, d):
  a, r = gz(d), jnp.exp(x - d.behavior)
  tau = np.where(a > 0, 1.0, 1.05)
  return -(seq(d) * 4 / tau / (1 + jnp.exp(-tau * (r - 1))) * a).sum()


def phi(s, d):
  a, w = gz(d), np.exp(((s - d.behavior) * d.mask).sum(1, keepdims=True))
  k, rate = np.where(a >= 0, 2.0, 3.0), np.where(a >= 0, 3.0, 2.0)
  return np.exp(rate) * w**k * np.exp(-rate * w)


def gmpo(x, s, d):
  a, value = gz(d), 0.0
  for b in range(B):
    n, sign = d.length[b], np.sign(a[b, 0])
    log_r = sign * (x[b, :n] - d.behavior[b, :n])
    value += a[b, 0] * jnp.exp(sign * jnp.minimum(log_r, jnp.clip(log_r, -0.4, 0.4)).mean())
  return -value / B


def drpo(x, s, d):
  score, value = mean(x, d)[:, 0], 0.0
  for g in range(P):
    rows = np.arange(g * G, (g + 1) * G)
    right, wrong = rows[d.correct[rows] == 1], rows[d.correct[rows] == 0]
    if not len(right) or not len(wrong):
      continue
    omega = np.exp((1 - d.length[right] / T) / 0.1)
    value += (omega * score[right]).sum() / omega.sum()
    value -= 10 * jnp.log(jnp.exp(score[wrong] / 10).mean())
  force = max(1000 * ((tok(d) * (d.behavior - s)).sum() - 1e-4), 0)
  return -value / P + force * (tok(d) * (d.behavior - x)).sum()


def kimi(x, s, d):
  return -(tok(d) * (gm(d) * x - 0.1 / 2 * (x - d.behavior) ** 2)).sum()


soft_value = by_group(lambda r, n: 0.5 * np.log(np.exp(r / 0.5).mean()))


def a_star_po(x, s, d):
  moved = ((x - d.reference) * d.mask).sum(1)
  error = 0.3 * moved - (d.reward - soft_value(d)[:, 0])
  return (error**2).mean() / (2 * 0.3 * 1.5)


def oapl(x, s, d):
  error = 0.3 * ((x - d.behavior) * d.mask).sum(1) - (d.reward - soft_value(d)[:, 0])
  return (error**2).mean() / (2 * 0.3 * 1.5)


def vcpo(x, s, d):
  w = np.exp(((s - d.behavior) * d.mask).sum(1))
  a = np.zeros((B, 1))
  for g in range(P):
    rows = np.arange(g * G, (g + 1) * G)
    square, reward = (w[rows] * d.norm[rows]) ** 2, d.reward[rows]
    b = (square * reward).sum() / (square.sum() + 1e-8)
    a[rows, 0] = (reward - b) / reward.std()
  return -(seq(d) * w[:, None] * a * x).sum()


def opsm_keep(s, d):
  return ~((gz(d) < 0) & (mean(d.behavior - s, d) > 0.01))


def mpt(s, d):
  low = (d.entropy * d.mask).sum() / d.mask.sum() < 0.2
  return ~((np.exp(s) >= 0.7) & (d.correct[:, None] == 1)) if low else 1.0


def fork(s, d):
  tokens = np.sort(d.entropy[d.mask > 0])[::-1]
  return d.entropy >= tokens[int(np.ceil(0.2 * len(tokens))) - 1]


def product(s, d):
  w, a = tok(d), gz(d) * d.mask
  return (a - (w * a).sum()) * (s - (w * s).sum())


def clip_cov(s, d):
  a, r = gz(d), np.exp(s - d.behavior)
  clipped = ((a > 0) & (r > 1.2)) | ((a < 0) & (r < 0.8))
  band = (product(s, d) > 0.1) & (product(s, d) < 1) & (d.mask > 0) & ~clipped
  return np.where(band, 1 - min(max(int(0.05 * d.mask.sum()), 1) / band.sum(), 1), 1)


def spear(s, d):
  """Without replayed rows: Clip-Cov with advantages that no standard deviation divides."""
  a, r, w = gm(d) * d.mask, np.exp(s - d.behavior), tok(d)
  clipped = ((a > 0) & (r > 1.2)) | ((a < 0) & (r < 0.8))
  cov = (a - (w * a).sum()) * (s - (w * s).sum())
  band = (cov > 0.02) & (cov < 0.5) & (d.mask > 0) & ~clipped
  return np.where(band, 1 - min(max(int(0.05 * d.mask.sum()), 1) / band.sum(), 1), 1)


def kl_cov(x, s, d):
  n = int(0.1 * d.mask.sum())
  edge = np.sort(product(s, d)[d.mask > 0])[-n]
  top = (product(s, d) >= edge) & (d.mask > 0)
  r = jnp.exp(x - d.behavior)
  return -(tok(d) * (r * gz(d) - jnp.where(top, jnp.abs(x - d.behavior), 0))).sum()


def xrpo(s, d):
  score, a, out = mean(s, d)[:, 0], gz(d)[:, 0], np.ones(B)
  for b in range(B):
    rows = np.arange(b // G * G, b // G * G + G)
    eta = np.exp(score[b] - score[rows].mean())
    if d.correct[b] and a[b] > 0:
      out[b] = (a[b] + min(max(1.5 * (1 - eta), 0), 0.3 * a[b])) / a[b]
  return out[:, None]


def with_kl(value):
  """GRPO with 0.05 times a divergence, the same mean over sequences."""
  return lambda x, s, d: ppo()(x, s, d) + 0.05 * (seq(d) * value(x, s, d)).sum()


def clpo(x, s, d):
  """A dual clip, and half the KL term where at most 0.6 of a group is right."""
  rate = np.repeat(d.correct.reshape(P, G).mean(1), G)[:, None]
  scale = np.where(rate <= 0.6, 0.5, 0.9)
  policy = ppo(agg=mixed, dual=1.3)(x, s, d)
  return policy + 0.05 * (mixed(d) * scale * k3(x, s, d)).sum()


def r3l(x, s, d):
  """Amplified advantages, and 0.05 times k2."""
  return reinforce(amplified, tok)(x, s, d) + 0.05 * (tok(d) * (x - d.reference) ** 2 / 2).sum()


def interpolated(x, s, d):
  alpha = (d.age - 1) / d.age  # the batch has taken one step
  old = d.behavior + alpha * (s - d.behavior)
  return ppo(agg=tok, rho=rho)(x, s, types.SimpleNamespace(**(vars(d) | dict(old=old))))


def k3(x, s, d):
  return jnp.exp(d.reference - x) - (d.reference - x) - 1


def v(x, d):
  return jnp.exp(x - d.behavior)


def scaled(base, factor):
  """The same loss with detached weights on its tokens: mask and multiplier stages."""

  def loss(x, s, d):
    keep = types.SimpleNamespace(**vars(d))
    keep.factor = factor(s, d)
    return base(x, s, keep)

  return loss


def tagged(agg):
  return lambda d: agg(d) * d.factor


# The first row of a group has a part of its own.
ORDERED = ('remax',)
_OUT = dict(importance_correction=dict(fn='divergent_negatives', delta=0.01))
METHODS = {
  'grpo': Row({}, ppo()),
  'dr_grpo': Row(dict(advantage='group_centered', aggregation='fixed'), ppo(adv=gm, agg=fix)),
  'rloo': Row(
    dict(advantage='leave_one_out', ratio='one', trust_region='none', aggregation='sequence_sum'),
    reinforce(loo, total),
    value=False,
  ),
  'pass_at_k': Row(
    dict(advantage=dict(fn='pass_at_k', k=2), aggregation='token_mean'),
    ppo(adv=by_group(pass_at_k), agg=tok),
  ),
  'best_of_k': Row(
    dict(advantage='best_margin', aggregation='token_mean'), ppo(adv=by_group(best_margin), agg=tok)
  ),
  'gpg': Row(
    dict(
      advantage=dict(fn='rescaled', scale=2.0),
      ratio='one',
      trust_region='none',
      aggregation='token_mean',
    ),
    reinforce(gpg, tok),
    value=False,
  ),
  'remax': Row(
    dict(advantage='greedy_baseline', ratio='one', trust_region='none', aggregation='token_mean'),
    reinforce(greedy, unled),
    value=False,
  ),
  'otb': Row(
    dict(advantage='raw', advantage_modulation='token_baseline', aggregation='token_mean'),
    ppo(adv=otb, agg=tok),
    on_policy=False,
  ),
  'dapo': Row(
    dict(
      trust_region=dict(fn='clip', low=0.2, high=0.28),
      aggregation='token_mean',
      zero_variance='mask',
    ),
    ppo(high=0.28, agg=mixed),
  ),
  'ppo': Row(
    dict(
      advantage='raw',
      credit_assignment=dict(fn='gae', discount=0.97, trace=0.9),
      auxiliary_model='critic',
      aggregation='token_mean',
    ),
    ppo(adv=lambda d: tokens_whitened(gae(d), d), agg=tok),
  ),
  'ppo_reward_kl': Row(
    dict(
      advantage='raw',
      reward_kl=dict(fn='k1', coef=0.3),
      credit_assignment=dict(fn='gae', discount=0.97, trace=0.9),
      auxiliary_model='critic',
      aggregation='token_mean',
    ),
    ppo(adv=lambda d: tokens_whitened(gae(d, cost=penalty(d)), d), agg=tok),
  ),
  'reward_kl': Row(
    dict(reward_kl=dict(fn='k1', coef=0.3), aggregation='token_mean'),
    ppo(adv=of_reward(penalized), agg=tok),
  ),
  'reward_k2': Row(
    dict(reward_kl=dict(fn='k2', coef=0.3), aggregation='token_mean'),
    ppo(adv=of_reward(lambda d: d.reward - penalty(d, lambda x: x**2 / 2).sum(1)), agg=tok),
  ),
  'reward_k3': Row(
    dict(reward_kl=dict(fn='k3', coef=0.3), aggregation='token_mean'),
    ppo(
      adv=of_reward(lambda d: d.reward - penalty(d, lambda x: np.exp(-x) + x - 1).sum(1)), agg=tok
    ),
  ),
  'reward_absolute': Row(
    dict(reward_kl=dict(fn='absolute', coef=0.3), aggregation='token_mean'),
    ppo(adv=of_reward(lambda d: d.reward - penalty(d, np.abs).sum(1)), agg=tok),
  ),
  'reinforce_pp_kl': Row(
    dict(
      advantage='raw',
      reward_kl=dict(fn='k1', coef=0.3),
      credit_assignment=dict(fn='return_whitened', discount=0.9),
      aggregation='token_mean',
    ),
    ppo(adv=lambda d: tokens_whitened(to_go(d), d), agg=tok),
  ),
  'branch_grpo': Row(
    dict(advantage='raw', credit_assignment='by_depth', aggregation='token_mean'),
    ppo(adv=node_advantage, agg=tok),
  ),
  'prime': Row(
    dict(
      advantage='leave_one_out',
      credit_assignment=dict(fn='process', process=2.0, outcome=5.0),
      auxiliary_model='outcome',
      aggregation='token_mean',
    ),
    ppo(adv=prime, agg=tok),
  ),
  'rlfr': Row(
    dict(
      credit_assignment=dict(fn='flow', coef=0.3, threshold=0.4, top=2),
      auxiliary_model='flow',
      trust_region=dict(fn='dual_clip', most=3.0),
    ),
    ppo(adv=rlfr, dual=3.0),
  ),
  'oprl': Row(
    dict(credit_assignment=dict(fn='steps', weight=0.7), auxiliary_model='preference'),
    ppo(adv=oprl),
  ),
  'ppo_dual': Row(dict(trust_region=dict(fn='dual_clip', most=1.3)), ppo(dual=1.3)),
  'reinforce_pp': Row(
    dict(advantage='token_whitened', aggregation='token_mean'),
    ppo(adv=lambda d: whiten(d.reward[:, None], d), agg=tok),
  ),
  'reinforce_pp_baseline': Row(
    dict(advantage='group_whitened', aggregation='token_mean'),
    ppo(adv=lambda d: whiten(gm(d), d), agg=tok),
  ),
  'lite_ppo': Row(
    dict(advantage='batch_normalized', aggregation='token_mean'), ppo(adv=gb, agg=tok)
  ),
  'mc_grpo': Row(dict(advantage='median_centered'), ppo(adv=median)),
  'scale_rl': Row(
    dict(
      advantage='batch_normalized',
      ratio='direct',
      trust_region=dict(fn='cap', most=1.2),
      aggregation='prompt_mean',
    ),
    reinforce(gb, prm, lambda s, d: np.minimum(np.exp(s - d.behavior), 1.2)),
  ),
  'max_rl': Row(
    dict(advantage='mean_relative', ratio='one', trust_region='none', aggregation='token_mean'),
    reinforce(relative, tok),
    value=False,
  ),
  'opo': Row(
    dict(advantage='length_weighted', aggregation='token_mean'), ppo(adv=weighted, agg=tok)
  ),
  'adora': Row(
    dict(advantage=dict(fn='adora', long_tokens=6), aggregation='token_mean'),
    ppo(adv=adora, agg=tok),
  ),
  # One context a group: what two in a group do, test_groups.py says.
  # A prompt with one stage alone: tests/objective/test_batch_targets.py has several.
  'tree_opo': Row(dict(advantage='staged', aggregation='token_mean'), ppo(adv=gm, agg=tok)),
  'nudge_rl': Row(dict(advantage='nudged', aggregation='token_mean'), ppo(adv=gz, agg=tok)),
  'dars_et': Row(
    dict(advantage=dict(fn='equal_treatment', most=1.2)),
    ppo(adv=dars(lambda p: 1 / (4 * p * (1 - p)))),
  ),
  'dars_hw': Row(
    dict(advantage=dict(fn='hardness_weighted', most=1.2)), ppo(adv=dars(lambda p: 1 / (2 * p)))
  ),
  'rlep': Row(
    dict(
      trust_region=dict(fn='dual_clip', high=0.28, most=1.3),
      aggregation='token_mean',
      zero_variance='mask',
    ),
    ppo(high=0.28, agg=mixed, dual=1.3),
  ),
  'overlong': Row(
    dict(reward_shaping=dict(fn='overlong', buffer_tokens=4, factor=0.5)),
    ppo(adv=of_reward(overlong)),
  ),
  'apriel': Row(
    dict(reward_shaping=dict(fn='overlong_where_solved', buffer_tokens=4, power=2.0, failure=0.5)),
    ppo(adv=of_reward(apriel)),
  ),
  'grpo_lambda': Row(
    dict(reward_shaping=dict(fn='brief_where_solved', share=0.4, factor=0.7)),
    ppo(adv=of_reward(grpo_lambda)),
  ),
  'speciarl': Row(
    dict(reward_shaping=dict(fn='best_of_group', wrong=0.1)), ppo(adv=of_reward(speciarl))
  ),
  'fimi_rm': Row(
    dict(reward_shaping=dict(fn='length_fitted', degree=2, strength=0.7)),
    ppo(adv=of_reward(fimi)),
  ),
  'opmd': Row(
    dict(
      advantage=dict(fn='log_mean_exp', temperature=2.0),
      ratio='one',
      trust_region='none',
      aggregation='token_mean',
    ),
    reinforce(opmd, tok),
    value=False,
  ),
  'asym_re': Row(
    dict(advantage='shifted', ratio='one', trust_region='none', aggregation='token_mean'),
    reinforce(shifted, tok),
    value=False,
  ),
  'red_drop': Row(
    dict(advantage='balanced', ratio='one', trust_region='none', aggregation='token_mean'),
    reinforce(balanced, tok),
    value=False,
  ),
  'red_weight': Row(
    dict(
      advantage=dict(fn='exp_weighted', temperature=0.5),
      ratio='one',
      trust_region='none',
      aggregation='token_mean',
    ),
    reinforce(exp_weighted, tok),
    value=False,
  ),
  'alp': Row(  # of the noisy log-probs, which are `x` here
    dict(ratio='direct', trust_region=dict(fn='clip', low=0.2, high=0.3), aggregation='token_mean'),
    ppo(high=0.3, agg=tok),
  ),
  'gspo': Row(dict(ratio='sequence', trust_region=dict(fn='clip', low=3e-2, high=4e-2)), gspo),
  'luspo': Row(dict(ratio='sequence', aggregation='sequence_sum'), luspo),
  'gmpo': Row(dict(trust_region='geometric'), gmpo),
  'cispo_cap': Row(
    dict(trust_region=dict(fn='cap', most=1.2), aggregation='token_mean'),
    reinforce(gz, tok, lambda s, d: np.minimum(np.exp(s - d.behavior), 1.2)),
  ),
  'aipo': Row(
    dict(ratio='direct', trust_region=dict(fn='cap', most=1.2), aggregation='token_mean'),
    reinforce(gz, tok, lambda s, d: np.minimum(np.exp(s - d.behavior), 1.2)),
  ),
  'cispo_above': Row(
    dict(trust_region=dict(fn='cap_above', high=0.3), aggregation='token_mean'),
    reinforce(gz, tok, lambda s, d: np.minimum(np.exp(s - d.behavior), 1.3)),
  ),
  'cispo_band': Row(
    dict(trust_region=dict(fn='cap_band', low=0.1, high=0.3), aggregation='token_mean'),
    reinforce(gz, tok, lambda s, d: np.clip(np.exp(s - d.behavior), 0.9, 1.3)),
  ),
  'minpro': Row(dict(ratio='prefix_min', aggregation='token_mean'), minpro),
  'bapo': Row(dict(trust_region='balanced_clip', aggregation='token_mean'), bapo),
  'm2po': Row(
    dict(
      trust_region=dict(fn='second_moment_clip', budget=0.02, low=0.1, high=0.1),
      aggregation='token_mean',
    ),
    m2po,
  ),
  'm2po_mask': Row(dict(trust_region='second_moment_mask', aggregation='token_mean'), m2po_mask),
  'm2po_areal': Row(
    dict(
      importance_correction=dict(fn='second_moment_mask', budget=0.02), aggregation='token_mean'
    ),
    ppo(agg=tok, rho=rho_mask),
  ),
  'topr': Row(
    dict(
      advantage=dict(fn='raw', baseline=0.5),
      ratio='direct_product',
      trust_region='taper',
      aggregation='sequence_sum',
    ),
    reinforce(raw, total, lambda s, d: np.where(raw(d) > 0, 1, np.minimum(row_v(s, d), 1))),
  ),
  'topr_token': Row(
    dict(
      advantage=dict(fn='raw', baseline=0.5),
      ratio='direct',
      trust_region='taper',
      aggregation='sequence_sum',
    ),
    reinforce(
      raw, total, lambda s, d: np.where(raw(d) > 0, 1, np.minimum(np.exp(s - d.behavior), 1))
    ),
  ),
  'rec_one_side': Row(
    dict(advantage='group_centered', trust_region='one_side', aggregation='token_mean'),
    reinforce(gm, tok, lambda s, d: one_side(s, d) * np.exp(s - d.behavior)),
  ),
  'rec_one_side_plain': Row(
    dict(
      advantage='group_centered',
      trust_region=dict(fn='one_side', corrected=False),
      aggregation='token_mean',
    ),
    reinforce(gm, tok, one_side),
  ),
  'rec_ring': Row(
    dict(
      advantage='group_centered',
      trust_region=dict(fn='ring', outer_low=0.4, outer_high=0.5),
      aggregation='token_mean',
    ),
    reinforce(gm, tok, ring),
  ),
  'sppo': Row(
    dict(
      advantage='group_centered',
      trust_region=dict(fn='two_side', low=3 / 13, high=0.3, corrected=False),
      aggregation='token_mean',
    ),
    reinforce(gm, tok, two_side),
  ),
  'kimi': Row(
    dict(
      advantage='group_centered',
      ratio='one',
      trust_region='none',
      kl='quadratic',
      aggregation='token_mean',
    ),
    kimi,
    value=False,
  ),
  'score_centering': Row(
    dict(advantage='group_centered', ratio='one', trust_region='none', aggregation='token_mean'),
    reinforce(gm, tok),
    value=False,
  ),
  'a_star_po': Row(
    dict(
      advantage=dict(fn='log_mean_exp', temperature=0.5),
      ratio='one',
      trust_region='none',
      kl=dict(fn='sequence_quadratic', coef=0.3 / 1.5),
      aggregation='sequence_sum',
    ),
    a_star_po,
    on_policy=False,
    value=False,
  ),
  'oapl': Row(
    dict(
      advantage=dict(fn='log_mean_exp', temperature=0.5),
      ratio='one',
      trust_region='none',
      kl=dict(fn='sequence_quadratic_old', coef=0.3 / 1.5),
      aggregation='sequence_sum',
    ),
    oapl,
    value=False,
  ),
  'dppo_tv': Row(
    dict(
      advantage='group_centered',
      ratio='direct',
      trust_region=dict(fn='total_variation', delta=0.1),
      aggregation='token_mean',
    ),
    reinforce(gm, tok, variation),
  ),
  'dppo_kl': Row(
    dict(
      advantage='group_centered',
      ratio='direct',
      trust_region=dict(fn='binary_kl', delta=0.02),
      aggregation='token_mean',
    ),
    reinforce(gm, tok, bernoulli),
  ),
  'remix': Row(
    dict(
      ratio='direct',
      trust_region='shifted_clip',
      kl=dict(fn='receding', coef=0.05),
      aggregation='token_mean',
    ),
    remix,
    on_policy=False,
  ),
  'confidence_clip': Row(
    dict(trust_region=dict(fn='confidence_clip', tail=3), aggregation='token_mean'), confidence_clip
  ),
  'echo': Row(
    dict(
      advantage_modulation=dict(fn='unsure', multiply=0.2, add=0.3, most=1.5),
      trust_region=dict(fn='confidence_clip', tail=3),
      aggregation='token_mean',
    ),
    echo,
    on_policy=False,
  ),
  'gdpo': Row(dict(advantage='decoupled'), ppo(adv=gdpo)),
  'sapo': Row(dict(trust_region='sigmoid'), sapo),
  'vespo': Row(
    dict(ratio='product', trust_region='gamma', aggregation='token_mean'), reinforce(gz, tok, phi)
  ),
  'decoupled_ppo': Row(
    dict(importance_correction='token', aggregation='token_mean'), ppo(agg=tok, rho=rho)
  ),
  'ppo_ewma': Row(
    dict(
      importance_correction=dict(fn='token_truncate', high=1.2),
      old_policy=dict(fn='average', decay=0.9),
      aggregation='token_mean',
    ),
    ppo(agg=tok, rho=lambda d: np.minimum(rho(d), 1.2)),
  ),
  'areal_interpolated': Row(
    dict(importance_correction='token', old_policy='interpolated', aggregation='token_mean'),
    interpolated,
  ),
  'recorded': Row(dict(old_policy='recorded'), ppo()),
  'before': Row(dict(old_policy='before'), ppo(rho=lambda d: 1.0)),
  'tis': Row(
    dict(importance_correction=dict(fn='token_truncate', high=1.1)),
    ppo(rho=lambda d: np.minimum(rho(d), 1.1)),
  ),
  'sol_rl': Row(
    dict(importance_correction=dict(fn='token_truncate', high=1.1), aggregation='token_mean'),
    ppo(agg=tok, rho=lambda d: np.minimum(rho(d), 1.1)),
  ),
  'tis_sequence': Row(
    dict(importance_correction=dict(fn='sequence_truncate', high=1.1)),
    ppo(rho=lambda d: np.minimum(row_rho(d), 1.1)),
  ),
  'mis': Row(
    dict(importance_correction=dict(fn='sequence_mask', high=1.3)),
    ppo(rho=lambda d: row_rho(d) * (row_rho(d) <= 1.3)),
  ),
  'mis_geometric': Row(
    dict(importance_correction=dict(fn='geometric_mask', low=0.9, high=1.1)),
    ppo(rho=lambda d: rho(d) * (geo_rho(d) >= 0.9) * (geo_rho(d) <= 1.1)),
  ),
  'k3_rejection': Row(
    dict(importance_correction=dict(fn='sequence_divergence', most=0.02), aggregation='token_mean'),
    ppo(agg=tok, rho=lambda d: mean(rho(d) - 1 - np.log(rho(d)), d) <= 0.02),
  ),
  'k2_rejection_sum': Row(
    dict(
      importance_correction=dict(
        fn='sequence_divergence', estimator='k2', reduction='sum', most=0.06
      ),
    ),
    ppo(rho=lambda d: (np.log(rho(d)) ** 2 / 2 * d.mask).sum(1, keepdims=True) <= 0.06),
  ),
  'k3_rejection_max': Row(
    dict(importance_correction=dict(fn='sequence_divergence', reduction='max', most=0.03)),
    ppo(rho=lambda d: ((rho(d) - 1 - np.log(rho(d))) * d.mask).max(1, keepdims=True) <= 0.03),
  ),
  'k2_rejection_tokens': Row(
    dict(importance_correction=dict(fn='token_divergence', estimator='k2', most=0.02)),
    ppo(rho=lambda d: np.log(rho(d)) ** 2 / 2 <= 0.02),
  ),
  'icepop': Row(
    dict(importance_correction=dict(fn='token_mask', low=0.8, high=1.25), aggregation='token_mean'),
    ppo(agg=tok, rho=lambda d: rho(d) * (rho(d) >= 0.8) * (rho(d) <= 1.25)),
  ),
  'opsm': Row(_OUT, scaled(ppo(agg=tagged(seq)), opsm_keep)),
  'deepseek_v32': Row(
    _OUT | dict(kl=dict(fn='ratio_k3', coef=0.05)),
    lambda x, s, d: METHODS['opsm'].loss(x, s, d) + 0.05 * (seq(d) * v(x, d) * k3(x, s, d)).sum(),
    on_policy=False,
  ),
  'mini_rl': Row(
    dict(
      advantage='group_centered',
      importance_correction='token',
      trust_region=dict(fn='clip', low=0.2, high=0.27),
      aggregation='sequence_sum',
    ),
    ppo(high=0.27, adv=gm, agg=total, rho=rho),
  ),
  'vcpo': Row(
    dict(
      advantage='least_variance',
      ratio='direct_product',
      trust_region=dict(fn='cap', most=8.0),
      lr_scale='effective_sample_size',
    ),
    vcpo,
  ),
  'ulo_rl': Row(
    dict(token_weighting=dict(fn='uncertain', mastered=0.7), aggregation='token_mean'),
    scaled(ppo(agg=tagged(tok)), mpt),
    on_policy=False,
  ),
  'forking': Row(
    dict(token_weighting='forking', aggregation='token_mean'),
    scaled(ppo(agg=tagged(tok)), fork),
    on_policy=False,
  ),
  'clip_cov': Row(
    dict(
      token_weighting=dict(fn='covariance_clip', share=0.05, low=0.1, high=1.0),
      aggregation='token_mean',
    ),
    scaled(ppo(agg=tagged(tok)), clip_cov),
    on_policy=False,
  ),
  'spear': Row(
    dict(
      advantage='group_centered',
      token_weighting=dict(fn='covariance_clip_by_term', share=0.05, low=0.02, high=0.5),
      aggregation='fixed',
    ),
    scaled(ppo(adv=gm, agg=tagged(fix)), spear),
    on_policy=False,
  ),
  'kl_cov': Row(
    dict(trust_region='none', kl=dict(fn='covariance', share=0.1), aggregation='token_mean'), kl_cov
  ),
  'xrpo': Row(
    dict(token_weighting=dict(fn='sharpen', strength=1.5, most=0.3)),
    scaled(ppo(agg=tagged(seq)), xrpo),
    on_policy=False,
  ),
  'drpo': Row(
    dict(
      advantage=dict(fn='raw', baseline=0.5),
      ratio='one',
      trust_region=dict(fn='listwise', max_tokens=T),
      kl='hinge',
    ),
    drpo,
    on_policy=False,
    value=False,
  ),
  'hpt': Row(
    dict(advantage='group_centered', trust_region='none', aggregation='fixed'),
    lambda x, s, d: -(fix(d) * jnp.exp(x - d.behavior) * gm(d)).sum(),
  ),
  'exopd': Row(
    dict(
      advantage=dict(fn='raw', baseline=0.5),
      importance_correction=dict(fn='token_truncate', high=1.1),
      ratio='one',
      trust_region='none',
      aggregation='token_mean',
    ),
    reinforce(raw, tok, lambda s, d: np.minimum(rho(d), 1.1)),
    value=False,
  ),
  'sdpo': Row(
    dict(
      advantage=dict(fn='raw', baseline=0.5),
      importance_correction=dict(fn='token_truncate', high=1.1),
      trust_region=dict(fn='cap', most=1.2),
      aggregation='token_mean',
    ),
    reinforce(raw, tok, lambda s, d: np.minimum(rho(d), 1.1) * np.minimum(np.exp(s - d.old), 1.2)),
  ),
  'opsd': Row(
    dict(
      advantage=dict(fn='raw', baseline=0.5),
      ratio='one',
      trust_region='none',
      aggregation='token_mean',
    ),
    reinforce(raw, tok),
    value=False,
  ),
  'k1': Row(
    dict(kl=dict(fn='k1', coef=0.05)), with_kl(lambda x, s, d: x - d.reference), on_policy=False
  ),
  'k2': Row(
    dict(kl=dict(fn='k2', coef=0.05)),
    with_kl(lambda x, s, d: (x - d.reference) ** 2 / 2),
    on_policy=False,
  ),
  'k3': Row(dict(kl=dict(fn='k3', coef=0.05)), with_kl(k3), on_policy=False),
  'clpo': Row(
    dict(
      trust_region=dict(fn='dual_clip', most=1.3),
      kl=dict(fn='k3', coef=0.05),
      kl_scale=dict(fn='by_difficulty', hard=0.6, hard_scale=0.5, other_scale=0.9),
      aggregation='token_mean',
      zero_variance='mask',
    ),
    clpo,
    on_policy=False,
  ),
  'r3l': Row(
    dict(
      advantage=dict(fn='amplified', right=1.15),
      ratio='one',
      trust_region='none',
      kl=dict(fn='k2', coef=0.05),
      aggregation='token_mean',
    ),
    r3l,
    on_policy=False,
    value=False,
  ),
  'k3_straight': Row(
    dict(kl=dict(fn='k3_straight', coef=0.05)),
    with_kl(lambda x, s, d: k3(s, s, d) + ((x - d.reference) ** 2 - (s - d.reference) ** 2) / 2),
    on_policy=False,
  ),
  'ratio_k1': Row(
    dict(kl=dict(fn='ratio_k1', coef=0.05)),
    with_kl(lambda x, s, d: v(x, d) * (x - d.reference)),
    on_policy=False,
  ),
  'ratio_k3': Row(
    dict(kl=dict(fn='ratio_k3', coef=0.05)),
    with_kl(lambda x, s, d: v(x, d) * k3(x, s, d)),
    on_policy=False,
  ),
}


def row_v(s, d):
  return np.exp(((s - d.behavior) * d.mask).sum(1, keepdims=True))
