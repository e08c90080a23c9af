"""Every family against transformers in float64: the same formulas, however a layer amplifies roundings of float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models import decoder

torch = pytest.importorskip('torch')
pytest.importorskip('transformers')

from tests.models import test_families, test_parity, torch_float64  # noqa: E402

CASES = test_parity.CASES | test_families.CASES


def gap_of(case):
  """The largest difference of logits as a share of the largest one: transformers has Gemma's factors in float32."""
  return 1e-6 if 'gemma' in case else 1e-12


@pytest.mark.parametrize('case', CASES)
def test_logits_in_float64_equal_those_of_transformers(case, tmp_path):
  """Rows up to 40 tokens padded on the left, and rows up to 300 tokens."""
  model = test_parity.reference(*CASES[case])
  model.config._experts_implementation = 'eager'  # the other ones have no float64
  model.save_pretrained(tmp_path)
  for count, tokens, left in ((4, 40, True), (2, 300, False)):
    config, params = test_families.loaded(tmp_path, tokens)
    tokens_BxS, mask_BxS = test_families.rows(count, tokens, left)
    with torch_float64.float64_for_float32():
      theirs = test_parity.their_logits(model.double(), tokens_BxS, mask_BxS)
      params = jax.tree.map(lambda x: jnp.asarray(np.asarray(x, np.float64)), params)
      ours = np.asarray(decoder.forward(config, params, tokens_BxS, mask_BxS, dtype='float64'))
    assert theirs.dtype == ours.dtype == np.float64
    gap, top = np.abs(ours - theirs)[mask_BxS].max(), np.abs(theirs[mask_BxS]).max()
    assert gap <= gap_of(case) * top, (gap, top)
