"""SEELE, arXiv:2509.06923: as much of the answer is shown as makes every second rollout right, by item response theory.

python -m jaxrl_llm.main --config=seele
Numbers: a target of one half is the paper's; the curve is reconstructed from third-party notes, its priors are ours,
and visits of earlier steps stand for the paper's rounds within one. Its supervised term on the shown part is not in
here. All else is dapo.py's.
"""


def get_config():
  return dict(
    base='dapo', prompt_tokens=80, curriculum=dict(hint=dict(fn='item_response', target=0.5))
  )
