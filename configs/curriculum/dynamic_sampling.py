"""DAPO's dynamic sampling, arXiv:2503.14476: only mixed groups are learned from, in full batches.

python -m jaxrl_llm.main --config=dynamic_sampling
Numbers: at most 10 rounds of sampling are the paper's. A round is a step here, which learns nothing until a batch is
full. The paper discards surplus groups; here they wait for the next batch, at most 4 steps, which is ours. In dapo.py
zero-variance groups leave the loss and are not replaced. All other settings are those of dapo.py.
"""


def get_config():
  return dict(base='dapo', replay=dict(collect=dict(fn='mixed', patience=10, max_age=4)))
