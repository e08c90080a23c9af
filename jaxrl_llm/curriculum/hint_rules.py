"""How much of a known answer a prompt is given: rules and what is remembered of earlier hints.

A rule sees, of every prompt, (share of the answer shown, right, n) of its visits with and without a hint, and returns
the share to show now; 0 is the plain prompt. Evidence of hinted visits is none of the plain prompt's difficulty.
Every public function here may be named in `config.curriculum.hint.fn`; it makes the rule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from jaxrl_llm.types import UserError

PREFIX, CONTEXT = 'prefix', 'context'  # the reply begins with it, or the question tells it
_KEPT = 16  # visits that are remembered of a prompt


class Visit(NamedTuple):
  """A group that was graded."""

  share: float  # of the answer that was shown
  right: int
  n: int


class Rule(NamedTuple):
  """How hints are given, and how much."""

  form: str  # PREFIX or CONTEXT
  share: Callable[[list[Visit]], float]  # visits → how much of the answer to show, 0 = none
  plain: bool = False  # learned as the answer to the plain prompt: what was shown is taken away before the update
  exemplars: bool = False  # what is told is another prompt's solved question, not the own answer
  texts: tuple[str, ...] = ()  # what is told are these strategies, one for each slot of a prompt
  drop: float = 0.0  # the chance that a slot goes without its strategy
  skip: float = 0.0  # the chance that a prompt that has a share is shown nothing at a step
  noise: float = 0.0  # standard deviation of what is added to a share above 0


class HintScheduler:
  """The rule with its memory: prompt → its last visits, at most 16 of each prompt.

  A share depends on a prompt's visits alone, and is worked out when one is added: a step costs what it visits. Chance
  is drawn by (seed, step, prompt).
  """

  def __init__(self, rule: Rule, seed: int):
    self.rule, self.seed = rule, seed
    self._forget()

  def _forget(self) -> None:
    self.visits: dict[int, list[Visit]] = {}
    # Of prompts 0 to N − 1, N growing with the largest that was visited; nan for those that were not.
    self._share_N = np.zeros(0)
    self._counts_Nx2 = np.zeros((0, 2))  # right and wrong of the last visit with a hint

  def choose(self, index_P: np.ndarray, step: int) -> np.ndarray:
    """The share of its answer that each prompt is shown at this step, float32 [P]."""
    index_P = np.asarray(index_P, np.int64)
    known_P = index_P < len(self._share_N)
    share_P = np.full(len(index_P), np.nan)
    share_P[known_P] = self._share_N[index_P[known_P]]
    share_P = np.where(np.isnan(share_P), self.rule.share([]), share_P)
    return self._drawn(share_P, index_P, step).astype(np.float32)

  def evidence(self, step: int) -> tuple[np.ndarray, np.ndarray]:
    """(visited prompts that would be shown something at this step, (right, wrong) of their last visit with a hint)."""
    visited = np.flatnonzero(self._share_N > 0)
    shown = visited[self._drawn(self._share_N[visited], visited, step) > 0]
    return shown, self._counts_Nx2[shown]

  def observe(self, index_P: np.ndarray, share_P: np.ndarray, right_P, n_P) -> None:
    """Records what came of the hints, and of the plain prompts."""
    for told in zip(
      index_P.tolist(), share_P.tolist(), right_P.tolist(), n_P.tolist(), strict=True
    ):
      visits = [*self.visits.get(told[0], []), Visit(*told[1:])]
      self._record(told[0], visits[-_KEPT:])

  def _record(self, index: int, visits: list[Visit]) -> None:
    self.visits[index] = visits
    if (size := len(self._share_N)) <= index:
      more = max(2 * size, index + 1) - size
      self._share_N = np.concatenate([self._share_N, np.full(more, np.nan)])
      self._counts_Nx2 = np.concatenate([self._counts_Nx2, np.zeros((more, 2))])
    last = next((v for v in reversed(visits) if v.share > 0), Visit(0.0, 0, 0))
    self._share_N[index] = self.rule.share(visits)
    self._counts_Nx2[index] = last.right, last.n - last.right

  def _drawn(self, share_P: np.ndarray, index_P: np.ndarray, step: int) -> np.ndarray:
    """Shares after chance; what is drawn for a prompt is the same whichever others are asked for."""
    if not len(index_P) or not (self.rule.skip or self.rule.noise):
      return share_P
    size, shown_P = int(index_P.max()) + 1, share_P > 0
    if self.rule.noise:
      noise_N = np.random.default_rng((self.seed, 4, step, 1)).standard_normal(size)
      share_P = np.clip(share_P + self.rule.noise * noise_N[index_P], 0, 1)
    if self.rule.skip:
      chance_N = np.random.default_rng((self.seed, 4, step, 0)).random(size)
      shown_P &= chance_N[index_P] >= self.rule.skip
    return np.where(shown_P, share_P, 0.0)

  def state_dict(self) -> dict:
    """For the checkpoint. Source: none."""
    return {str(index): [list(v) for v in visits] for index, visits in self.visits.items()}

  def load_state_dict(self, state: dict) -> None:
    """Back from `state_dict`. Source: none."""
    self._forget()
    for index, visits in state.items():
      self._record(int(index), [Visit(*v) for v in visits])


def none() -> Rule | None:
  """Every prompt is plain. Source: none."""
  return None


def prefix(
  *, start: float = 0.75, step: float = 0.125, plain: float = 0.25, after: int = 1
) -> Rule:
  """A prompt that `after` plain visits never solved begins its reply with a part of a known answer.

  The share begins at `start`, grows by `step` when nobody was right and shrinks when more than half were, so that its
  end comes near; when it is 0 the prompt is plain again. A share `plain` of visits is plain anyhow. The paper fixes the
  prefixes before training so that the model has a reasonable accuracy; the staircase is ours.
  Source: arXiv:2601.18795 (PrefixRL, abstract); the staircase: none.
  """
  _within('start', start, 0, 1)
  _within('step', step, 0, 1)
  _within('plain', plain, 0, 1)
  _at_least('after', after, 0)
  return Rule(PREFIX, lambda visits: _staircase(visits, start, step, after), skip=plain)


def guide(*, after: int = 1) -> Rule:
  """When all rollouts of a prompt's last `after` plain visits failed, the question of the next ones tells the answer.

  What they say is learned as an answer to the plain question, with the ratio π(y | plain) / π_old(y | told) that the
  objective clips. Source: arXiv:2506.13923 (Guide; formula from memory, constants ours).
  """
  _at_least('after', after, 1)

  def share(visits):
    last = [v.right for v in visits if v.share == 0][-after:]
    told = bool(visits) and visits[-1].share > 0  # a guided visit is followed by a plain one
    return float(len(last) == after and not any(last) and not told)

  return Rule(CONTEXT, share, plain=True)


def item_response(
  *, target: float = 0.5, slope: float = 8.0, guess: float = 0.0, plain: float = 0.0
) -> Rule:
  """The share h with f(h) = c + (1 − c)·σ(a·(h − b)) = target, a and b fitted to all visits of a prompt.

  h = b + ln((p* − c) / (1 − p*)) / a, cut to [0, 1]; a and b by penalised likelihood on a grid, around `slope` and ½;
  c is `guess`. In rounds of one visit each, where the paper has several before an update.
  Source: arXiv:2509.06923 (SEELE; reconstructed from third-party notes).
  """
  _within('target', target, 0.05, 0.95)
  _within('guess', guess, 0, 0.9 * target)
  _within('plain', plain, 0, 1)

  def share(visits):
    a, b = _fit_item(visits, slope, guess)
    return float(np.clip(b + np.log((target - guess) / (1 - target)) / a, 0, 1))

  return Rule(PREFIX, share, skip=plain)


def by_difficulty(*, least: float = 0.0, most: float = 0.8, noise: float = 0.1) -> Rule:
  """share = (w_max − w_min)·(1 − r̄) + w_min + noise·N(0, 1), r̄ the success rate of the last plain visit.

  A prompt that was never seen plain is plain. The gate on entropy and the weights between hinted and plain groups are
  not in here. Source: arXiv:2512.13095 (ADHint; from third-party notes, constants ours).
  """
  _within('least', least, 0, 1)
  _within('most', most, least, 1)
  _within('noise', noise, 0, 1)

  def share(visits):
    seen = [v for v in visits if v.share == 0]
    if not seen or visits[-1].share > 0:  # a hinted visit is followed by a plain one
      return 0.0
    hard = 1 - seen[-1].right / seen[-1].n
    return (most - least) * hard + least if hard else 0.0

  return Rule(PREFIX, share, noise=noise)


def exemplars(*, after: int = 1) -> Rule:
  """A prompt that nobody solved is asked again behind a solved question of its kind.

  Source: arXiv:2510.06672 (XRPO; from third-party notes).
  """
  rule = guide(after=after)
  return rule._replace(plain=False, exemplars=True)


def contexts(*, texts: tuple[str, ...], drop: float = 0.5) -> Rule:
  """Slot i of a prompt is asked with strategy i mod len(texts) behind its question, or with chance `drop` without.

  advantage.fn=nudged compares them; `config.curriculum.slots_per_prompt` gives a prompt as many slots. What is learned stays behind
  the strategy: the paper's term on the plain question is not in here. Source: arXiv:2605.15726 (NudgeRL).
  """
  _within('drop', drop, 0, 1)
  told = tuple(texts)
  if not told or not all(isinstance(text, str) and text.strip() for text in told):
    raise UserError(
      f'config.curriculum.hint.texts={texts!r} must be strategies, each a text; two are a good start.'
    )
  return Rule(CONTEXT, lambda visits: 0.0, texts=told, drop=drop)


def _staircase(visits: list[Visit], start: float, step: float, after: int) -> float:
  bare = [v for v in visits if v.share == 0]
  if len(bare) < after or any(v.right for v in bare):
    return 0.0
  hinted = [v for v in visits if v.share > 0]
  if not hinted:
    return start
  share, right, n = hinted[-1]
  if right == 0:
    return min(share + step, 1.0)
  return max(share - step, 0.0) if 2 * right > n else share


_SHARES = np.linspace(-0.5, 1.5, 81)  # b
_SLOPES = np.exp(np.linspace(-1.5, 1.5, 13))  # a, as a multiple of the setting


def _fit_item(visits: list[Visit], slope: float = 8.0, guess: float = 0.0) -> tuple[float, float]:
  """(a, b) of f(h) = c + (1 − c)·σ(a·(h − b)), the likeliest on a grid, under ln(a / slope) ~ N(0, ½²), b ~ N(½, ½²).

  Source: arXiv:2509.06923 (SEELE; reconstructed, the priors are ours).
  """
  a, b = np.meshgrid(slope * _SLOPES, _SHARES, indexing='ij')
  score = -2 * np.log(a / slope) ** 2 - 2 * (b - 0.5) ** 2
  for h, right, n in visits:
    rate = guess + (1 - guess) / (1 + np.exp(-a * (h - b)))
    rate = np.clip(rate, 1e-6, 1 - 1e-6)
    score = score + right * np.log(rate) + (n - right) * np.log1p(-rate)
  at = np.unravel_index(score.argmax(), score.shape)
  return float(a[at]), float(b[at])


def _within(name: str, value: float, low: float, high: float) -> None:
  if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
    raise UserError(
      f'config.curriculum.hint.{name}={value!r} must be a number from {low} to {high}.'
    )


def _at_least(name: str, value: int, least: int) -> None:
  if type(value) is not int or value < least:
    raise UserError(
      f'config.curriculum.hint.{name}={value!r} must be a whole number of at least {least}.'
    )
