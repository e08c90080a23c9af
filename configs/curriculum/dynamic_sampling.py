"""DAPO's dynamic sampling, arXiv:2503.14476: only groups whose rewards differ are learned from, in full batches.

python -m jaxrl_llm.main --config=dynamic_sampling
Numbers: at most 10 rounds are the paper's; a round here is a call of the program, which learns nothing until a batch
is full. The paper throws surplus groups away; here they wait for the next batch, at most 4 calls, which is ours. All
else is dapo.py's, where all-equal groups leave the loss and nothing replaces them.
"""


def get_config():
  return dict(base='dapo', replay=dict(collect=dict(fn='mixed', patience=10, max_age=4)))
