"""Hints from known answers: rules for the share of an answer to reveal.

A rule maps the visits of a prompt, (share of the answer revealed, right, n) each, to the share for the next one; 0 is
the plain prompt. Hinted rollouts do not update the difficulty posterior. Every public function may be named in
`config.curriculum.hint.fn`; it returns the rule.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jaxrl_llm.curriculum.hint_writing import FIELDS, INSTRUCTION, Writing
from jaxrl_llm.curriculum.reflection import GUIDANCE, REQUEST, Reflection
from jaxrl_llm.curriculum.rewriting import SIMPLIFY, VARY, Rewriting, check_instruction
from jaxrl_llm.types import UserError

PREFIX, CONTEXT = 'prefix', 'context'  # the start of the completion, or a part of the prompt


class Visit(NamedTuple):
  """A graded group."""

  share: float  # of the answer that was revealed; 0: the plain prompt
  right: int
  n: int


class Correction(NamedTuple):
  """Where completions go wrong, and who completes them anew."""

  part: str  # name of the reward that is the share of a completion before its first wrong step
  least: float  # above which a share is corrected
  guided: bool  # the demonstration of the data is in the prompt of a correction


class Rule(NamedTuple):
  """The form and the amount of hints."""

  form: str  # PREFIX or CONTEXT
  share: Callable[[list[Visit]], float]  # visits → share of the answer to reveal, 0 = none
  plain: bool = False  # trained as completions of the plain prompt: the update removes the hint
  learned: bool = True  # a hinted group is learned; False: its right completions are cached alone
  exemplars: bool = False  # the hint is another solved question instead of the answer
  texts: tuple[str, ...] = ()  # strategies as hints, one for each slot of a prompt
  drop: float = 0.0  # probability that a slot gets no strategy
  skip: float = 0.0  # probability that a prompt with a share above 0 gets no hint at a step
  noise: float = 0.0  # standard deviation of noise on shares above 0
  rewriting: Rewriting | None = None  # the policy writes another question; None: no
  correction: Correction | None = None  # a wrong completion is completed anew; None: no
  by_slot: tuple[float, ...] = ()  # shares of the answer, one for each slot of a prompt
  reflection: Reflection | None = None  # the policy reflects on failed attempts; None: no
  writing: Writing | None = None  # the policy writes hints; None: no


def none() -> Rule | None:
  """No hints."""
  return None


def prefix(
  *, start: float = 0.75, step: float = 0.125, plain: float = 0.25, after: int = 1
) -> Rule:
  """Completions of a prompt that `after` plain visits never solved begin with a part of a known answer.

  The share starts at `start`, grows by `step` when no rollout was right and shrinks when more than half were; at 0 the
  prompt is plain again. A share `plain` of the visits is always plain. The paper fixes the prefixes before training, at
  a reasonable accuracy of the model; the staircase is ours. arXiv:2601.18795 (PrefixRL, abstract).
  """
  _check_range('start', start, 0, 1)
  _check_range('step', step, 0, 1)
  _check_range('plain', plain, 0, 1)
  _check_integer('after', after, 0)
  return Rule(PREFIX, lambda visits: _staircase(visits, start, step, after), skip=plain)


def guide(*, after: int = 1) -> Rule:
  """The prompt contains the answer when all rollouts of its last `after` plain visits failed.

  Completions are trained on the plain prompt, with the ratio π(y | plain) / π_old(y | hinted) that the objective clips.
  arXiv:2506.13923 (Guide; formula from memory, constants ours).
  """
  _check_integer('after', after, 1)

  def share(visits: list[Visit]) -> float:
    last = [v.right for v in visits if v.share == 0][-after:]
    hinted = bool(visits) and visits[-1].share > 0  # a hinted visit is followed by a plain one
    return float(len(last) == after and not any(last) and not hinted)

  return Rule(CONTEXT, share, plain=True)


def self_rolled(*, after: int = 1) -> Rule:
  """The prompt contains a demonstration when its last `after` plain visits failed, until a completion is right.

  Hinted groups are not learned: right completions fill the cache of `config.replay.reuse.fn=cached`, which injects them
  behind the plain prompt. Of a prompt the last 16 visits count.
  arXiv:2601.05787 (BEPA, LEVEL-1; reconstructed: the paper seeds its cache before training, with an extracted plan).
  """
  failed = guide(after=after).share

  def share(visits: list[Visit]) -> float:
    return 0.0 if any(v.right for v in visits) else failed(visits)

  return Rule(CONTEXT, share, plain=True, learned=False)


def item_response(
  *, target: float = 0.5, slope: float = 8.0, guess: float = 0.0, plain: float = 0.0
) -> Rule:
  """The share h with f(h) = c + (1 − c)·σ(a·(h − b)) = target, a and b fitted to all visits of a prompt.

  h = b + ln((p* − c) / (1 − p*)) / a, cut to [0, 1]; a and b by penalized likelihood on a grid, around `slope` and ½;
  c is `guess`. One visit per update, where the paper has several.
  arXiv:2509.06923 (SEELE; reconstructed from third-party notes).
  """
  _check_range('target', target, 0.05, 0.95)
  _check_range('guess', guess, 0, 0.9 * target)
  _check_range('plain', plain, 0, 1)

  def share(visits: list[Visit]) -> float:
    a, b = _fit_item(visits, slope, guess)
    return float(np.clip(b + np.log((target - guess) / (1 - target)) / a, 0, 1))

  return Rule(PREFIX, share, skip=plain)


def by_difficulty(*, least: float = 0.0, most: float = 0.8, noise: float = 0.1) -> Rule:
  """share = (w_max − w_min)·(1 − r̄) + w_min + noise·N(0, 1), r̄ the success rate of the last plain visit.

  A prompt without a plain visit is plain. The paper's gate on entropy and its weights between hinted and plain groups
  are not implemented. arXiv:2512.13095 (ADHint; from third-party notes, constants ours).
  """
  _check_range('least', least, 0, 1)
  _check_range('most', most, least, 1)
  _check_range('noise', noise, 0, 1)

  def share(visits: list[Visit]) -> float:
    plain = [v for v in visits if v.share == 0]
    if not plain or visits[-1].share > 0:  # a hinted visit is followed by a plain one
      return 0.0
    hard = 1 - plain[-1].right / plain[-1].n
    return (most - least) * hard + least if hard else 0.0

  return Rule(PREFIX, share, noise=noise)


def exemplars(*, after: int = 1) -> Rule:
  """An unsolved prompt follows a solved question of its kind at the next visit.

  arXiv:2510.06672 (XRPO; from third-party notes).
  """
  rule = guide(after=after)
  return rule._replace(plain=False, exemplars=True)


def contexts(*, texts: tuple[str, ...], drop: float = 0.5) -> Rule:
  """Slot i of a prompt has strategy i mod len(texts) after its question, or none with probability `drop`.

  `advantage.fn=nudged` compares the strategies; `config.curriculum.slots_per_prompt` sets the number of slots.
  Completions are trained with the strategy in the prompt: the paper's term on the plain prompt is not implemented.
  arXiv:2605.15726 (NudgeRL).
  """
  _check_range('drop', drop, 0, 1)
  strategies = tuple(texts)
  if not strategies or not all(isinstance(x, str) and x.strip() for x in strategies):
    raise UserError(
      f'config.curriculum.hint.texts={texts!r} must be strategies, each a text; two are a good start.'
    )
  return Rule(CONTEXT, lambda visits: 0.0, texts=strategies, drop=drop)


def stages(*, shares: Sequence[float] = (0.0, 0.25, 0.5, 0.75)) -> Rule:
  """Slot i of a prompt begins with `shares[i mod n]` of a known answer, its stage; without one it is plain.

  `advantage.fn=staged` compares the stages; `config.curriculum.slots_per_prompt` sets the number of slots. The paper
  has prefixes of a stronger model's tree search, here they are those of the run's right completions, or of the answer
  in the data: one path of a tree. arXiv:2509.09284 (Tree-OPO; shares are ours).
  """
  where, known = 'config.curriculum.hint.shares', 'begin with 0 and rise, below 1'
  if not isinstance(shares, Sequence) or isinstance(shares, str):
    raise UserError(f'{where}={shares!r} must be a list of numbers that {known}.')
  rises = all(a < b for a, b in itertools.pairwise([*shares, 1]))
  if len(shares) < 2 or shares[0] != 0 or not rises:
    raise UserError(f'{where}={list(shares)} must {known}, with at least two numbers.')
  return Rule(PREFIX, lambda visits: 0.0, by_slot=tuple(shares))


def rewritten(
  *,
  hard: float = 0.3,
  medium: float = 0.7,
  simplify: str = SIMPLIFY,
  vary: str = VARY,
  least_chars: int = 11,
  most_chars: int = 1999,
) -> Rule:
  """The policy simplifies prompts with a success rate up to `hard`, and rephrases those up to `medium`.

  The rate is that of a plain group. The next step asks for another question, the step after samples it, and the prompt
  is plain again. A request names the answer; without one in the data the prompt stays as it is. That the answer stands
  is checked as in the official code, by learning from mixed groups alone (`zero_variance.fn=mask`): a question that is
  never answered as the data says teaches nothing. The official code asks for one question, with temperature 0.7 and at
  most 400 tokens, and samples it in the same step; here a request takes a slot, with the settings of the run.
  arXiv:2509.25004 (CLPO).
  """
  _check_range('medium', medium, 0, 1)
  _check_range('hard', hard, 0, medium)
  _check_integer('least_chars', least_chars, 1)
  _check_integer('most_chars', most_chars, least_chars)
  for name, text in (('simplify', simplify), ('vary', vary)):
    check_instruction(name, text, others=('answer',))
  settings = Rewriting(hard, medium, simplify, vary, least_chars, most_chars)

  return Rule(CONTEXT, lambda visits: 0.0, rewriting=settings)


def corrected(*, part: str = 'steps', least: float = 0.0, guided: bool = True) -> Rule:
  """The wrong completion that goes wrong last is completed anew from its first wrong step, where none is right.

  The reward of config.rewards.parts with the name `part` is the share of a completion before its first wrong step. In
  the next step a slot of the prompt samples continuations of that prefix, with the demonstration in the prompt where it
  is `guided`. The first right one makes a whole completion, which replaces the wrong one in the group that was sampled;
  every token keeps the log-prob with which it was sampled. A group is learned once, after its correction.
  arXiv:2602.24110 (SCOPE; reconstructed from the abstract and third-party notes: a process reward model finds the step,
  and a stronger policy corrects it in the same step of training).
  """
  _check_range('least', least, 0, 1)
  if not isinstance(part, str) or not part:
    raise UserError(
      f'config.curriculum.hint.part={part!r} must be the name of one of config.rewards.parts, such as steps.'
    )
  if not isinstance(guided, bool):
    raise UserError(f'config.curriculum.hint.guided={guided!r} must be True or False.')
  return Rule(PREFIX, lambda visits: 0.0, correction=Correction(part, least, guided))


def reflected(*, request: str = REQUEST, guidance: str = GUIDANCE) -> Rule:
  """The policy reflects on a failed attempt, and tries again from the pivot of its report, which guides it.

  The step after a plain group that is not all right asks for reflections on its first failed attempt. The step after
  samples retries: the prompt contains the first valid report, and the completion begins with the steps before its
  pivot; steps are the lines of the attempt. Retries are learned without the report, in one group with the attempt,
  which replaces the last of them. In both, the steps before the pivot are part of the prompt and have no loss. The
  other attempts wait for the reflection and are learned as a group of their own; without a valid report all of them
  are. Where a retry is right, the reflection and the first such retry, with its guidance, are learned as groups of one
  row with reward 1. All wait for an empty slot, such as that of a request; of single rows, the newest of two batches.
  The official code samples attempts, a reflection and a retry of each in one step, with one baseline for all of them.
  arXiv:2601.03715 (R3L).
  """
  check_instruction('request', request, ('question', 'attempt'))
  check_instruction('guidance', guidance, ('question', 'report'))
  return Rule(CONTEXT, lambda visits: 0.0, reflection=Reflection(request, guidance))


def written(
  *,
  hints: int = 4,
  instruction: str = INSTRUCTION,
  tag: str = 'hint',
  temperature: float = 0.3,
  penalty: float = -0.2,
) -> Rule:
  """The policy writes hints for the questions that it never solved, and learns to write them.

  After a plain group of wrong rows alone, a request holds the question, one of these rows and the solution of the data.
  Its first `hints` replies are hints, and each is sampled with. The group of the best one is learned where it is mixed.
  The request is learned, too, as a group of these replies; their reward is `Writing.reward`,
  (1 − p̂ⁿ − (1 − p̂)ⁿ)·exp(min(Δ, 0) / `temperature`), and `penalty` for a hint that has no text, contains the answer or
  does not fit. The paper trains a second model as the writer of hints; here it is the policy with another prompt.
  arXiv:2604.00698 (HiLL).
  """
  _check_integer('hints', hints, 2)
  check_instruction('instruction', instruction, others=FIELDS[1:])
  if not isinstance(tag, str) or not re.fullmatch(r'\w*', tag):
    raise UserError(
      f"config.curriculum.hint.tag={tag!r} must be the name of a tag such as 'hint', or empty for the whole reply."
    )
  _check_range('temperature', temperature, 0.001, 1000)
  _check_range('penalty', penalty, -1, 0)
  settings = Writing(hints, instruction, tag, temperature, penalty)
  return Rule(CONTEXT, lambda visits: 0.0, writing=settings)


def _staircase(visits: list[Visit], start: float, step: float, after: int) -> float:
  plain = [v for v in visits if v.share == 0]
  if len(plain) < after or any(v.right for v in plain):
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
  """(a, b) of f(h) = c + (1 − c)·σ(a·(h − b)): the posterior mode on a grid.

  The priors are ln(a / slope) ~ N(0, ½²) and b ~ N(½, ½²).
  arXiv:2509.06923 (SEELE; reconstructed, the priors are ours).
  """
  a, b = np.meshgrid(slope * _SLOPES, _SHARES, indexing='ij')
  score = -2 * np.log(a / slope) ** 2 - 2 * (b - 0.5) ** 2
  for h, right, n in visits:
    rate = guess + (1 - guess) / (1 + np.exp(-a * (h - b)))
    rate = np.clip(rate, 1e-6, 1 - 1e-6)
    score = score + right * np.log(rate) + (n - right) * np.log1p(-rate)
  at = np.unravel_index(score.argmax(), score.shape)
  return float(a[at]), float(b[at])


def _check_range(name: str, value: float, low: float, high: float) -> None:
  if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
    raise UserError(
      f'config.curriculum.hint.{name}={value!r} must be a number from {low} to {high}.'
    )


def _check_integer(name: str, value: int, least: int) -> None:
  if type(value) is not int or value < least:
    raise UserError(
      f'config.curriculum.hint.{name}={value!r} must be a whole number of at least {least}.'
    )
