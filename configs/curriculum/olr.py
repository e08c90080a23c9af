"""OLR, arXiv:2604.03993: a label that the majority of a prompt's rollouts contradicts increasingly is replaced.

python -m jaxrl_llm.main --config=olr
Numbers: a slope of 0.05 a visit, and no replacement before the sixth, are the official code's, which counts epochs.
Replaced labels are listed in suspect_labels.jsonl of the run directory. All other settings are those of dapo.py.
"""


def get_config():
  return dict(
    base='dapo', curriculum=dict(labels=dict(fn='majority_refined', min_slope=0.05, after=5))
  )
