"""SEELE, arXiv:2509.06923: hints as long as a success rate of one half needs, by item response theory.

python -m jaxrl_llm.main --config=seele
Numbers: the target of one half is the paper's. The curve is reconstructed from third-party notes, its priors are
ours, and visits of earlier steps stand for the paper's rounds within a step. Its supervised term on the hint is left
out. All other settings are those of dapo.py.
"""


def get_config():
  return dict(
    base='dapo', prompt_tokens=80, curriculum=dict(hint=dict(fn='item_response', target=0.5))
  )
