"""OLR, arXiv:2604.03993: a label that the majority of a prompt's rollouts contradicts more and more gives way.

python -m jaxrl_llm.main --config=olr
Numbers: a slope of 0.05 a visit, and no change before the fifth, are the official code's, which counts epochs. Labels
that gave way are listed in suspect_labels.jsonl of the run folder. All else is dapo.py's.
"""


def get_config():
  return dict(
    base='dapo', curriculum=dict(labels=dict(fn='majority_refined', min_slope=0.05, after=4))
  )
