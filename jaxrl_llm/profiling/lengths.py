"""Expected lengths of completions, as the share of completions that reach each token."""

from __future__ import annotations

import math

import numpy as np

from jaxrl_llm.types import UserError


def at_cap(max_tokens: int) -> np.ndarray:
  """Every completion has all its tokens: survival_T, the share of completions with more than t tokens."""
  return np.ones(max_tokens)


def log_normal(max_tokens: int, mean: float, sigma: float) -> np.ndarray:
  """survival_T of a log-normal length of at least one token, cut at `max_tokens`.

  `mean`: tokens, before the cut; `sigma`: standard deviation of the logarithm, 0 for equal lengths.
  """
  t = np.arange(1, max_tokens) + 0.5  # lengths are rounded
  if sigma == 0:
    return np.concatenate([[1.0], (t < mean).astype(float)])
  z = (np.log(t) - math.log(mean) + sigma**2 / 2) / (sigma * math.sqrt(2))
  return np.concatenate([[1.0], [math.erfc(x) / 2 for x in z]])


def parse(text: str, max_tokens: int) -> np.ndarray:
  """survival_T of the flag --lengths: '900,0.6', a mean in tokens and a sigma; '' stands for the cap.

  Raises UserError for anything else.
  """
  if not text:
    return at_cap(max_tokens)
  try:
    mean, sigma = map(float, text.split(','))
  except ValueError:
    mean = sigma = math.nan
  if not (mean >= 1 and 0 <= sigma < math.inf and mean < math.inf):
    raise UserError(
      f'--lengths={text!r} must be the mean of the completions in tokens, at least 1, and the standard deviation of '
      'its logarithm, at least 0: --lengths=900,0.6.'
    )
  return log_normal(max_tokens, mean, sigma)


def mean(survival_T: np.ndarray) -> float:
  """Expected tokens of a completion."""
  return float(survival_T.sum())


def longest(survival_T: np.ndarray, rows: int) -> float:
  """Expected tokens of the longest of `rows` completions."""
  return float((1 - (1 - survival_T) ** rows).sum())
