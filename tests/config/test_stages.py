"""`pick`: names, settings and their types, and the user's own functions."""

from __future__ import annotations

import pytest

from jaxrl_llm.config import stages
from jaxrl_llm.config.schema import stage
from jaxrl_llm.curriculum import hint_rules
from jaxrl_llm.objective import kl, old_policy, ratio, trust_region
from jaxrl_llm.types import UserError


def refusal(module, spec) -> str:
  with pytest.raises(UserError) as caught:
    stages.pick(module, spec, 'objective.x')
  return str(caught.value)


def test_a_stage_and_a_dict_pick_the_same_function():
  for spec in (stage('clip', low=0.1, high=0.3), dict(fn='clip', low=0.1, high=0.3)):
    picked = stages.pick(trust_region, spec)
    assert picked.func is trust_region.clip and picked.keywords == dict(low=0.1, high=0.3)


@pytest.mark.parametrize(
  'spec, text',
  [
    (dict(fn='clipp'), "config.objective.x.fn='clipp' is unknown; choose one of: "),
    (dict(fn=3), 'config.objective.x.fn=3 is unknown'),
    (dict(), 'config.objective.x.fn=None is unknown'),
    (dict(fn='clip', low=0.2, hihg=1), "hihg=1 is not a setting of 'clip', which takes: low, high"),
    (dict(fn='clip', low='a', high=1.0), "low='a' of 'clip' must be a number."),
  ],
)
def test_wrong_stages_are_refused(spec, text):
  assert text in refusal(trust_region, spec)


def test_a_function_without_inputs_stands_for_no_stage():
  assert stages.active(stages.pick(kl, dict(fn='none'))) is None
  assert stages.active(stages.pick(old_policy, dict(fn='average', decay=0.5))) is None
  picked = stages.pick(kl, dict(fn='k3', coef=0.1))
  assert stages.active(picked) is picked


def test_a_setting_without_a_default_is_required():
  with pytest.raises(UserError, match="config.hint.texts is missing; 'contexts' needs it."):
    stages.pick(hint_rules, dict(fn='contexts'), 'hint')


def test_a_users_own_function_is_imported(tmp_path, monkeypatch):
  (tmp_path / 'own_stage.py').write_text(
    'class Rules:\n  @staticmethod\n  def same(x, *, scale: float):\n    return scale * x\n'
  )
  monkeypatch.syspath_prepend(str(tmp_path))
  picked = stages.pick(ratio, dict(fn='own_stage:Rules.same', scale=2.0))
  assert picked(3) == 6
  assert "scale='a' of 'own_stage:Rules.same' must be a number" in refusal(
    ratio, dict(fn='own_stage:Rules.same', scale='a')
  )
  assert "'own_stage' has no function 'other'" in refusal(ratio, dict(fn='own_stage:other'))
  assert "importing 'no_such_stage' failed" in refusal(ratio, dict(fn='no_such_stage:f'))
