"""The tokens with which all prompts begin: system message and template. They are encoded once for all of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_LEAST_TOKENS = 8  # fewer do not pay for a second forward pass, which costs compile time as well


def shared_tokens(prompts: Sequence[np.ndarray], platform: str) -> int:
  """The number of first tokens that all prompts share and that none of them consists of; 0 where it does not pay.

  Accelerators encode a batch of short prompts in hardly more time than one of them, and compile slowly.
  """
  if platform != 'cpu' or not prompts:
    return 0
  first, count = prompts[0], min(map(len, prompts)) - 1
  for tokens in prompts[1:]:
    differs = tokens[:count] != first[:count]
    count = int(differs.argmax()) if differs.any() else count
  return count if count >= _LEAST_TOKENS else 0
