"""MoPPS, arXiv:2507.04632: a Beta posterior per prompt, one Thompson draw each, the draws nearest to one half.

python -m jaxrl_llm.main --config=mopps
Numbers: prior Beta(1, 1) and target 0.5 are the official code's. Its runs on MATH have windows of 16 times the batch
from a shuffled stream and no decay, its others 8 times and decay 0.5 a visit; here 16 times and 0.5. All other settings
are those of dapo.py.
"""


def get_config():
  return dict(
    base='dapo',
    curriculum=dict(
      candidates=dict(fn='stream', multiple=16),
      evidence_decay=dict(fn='visit', decay=0.5),
      prior_pooling=dict(fn='none'),
      rate_estimate=dict(fn='thompson'),
      utility=dict(fn='mopps', target=0.5),
      selection=dict(fn='top'),
      eligibility=dict(fn='none'),
    ),
  )
