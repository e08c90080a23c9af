"""OpenRS, arXiv:2602.14069: criteria drafted for every two replies under stated principles, and added up outside.

python -m jaxrl_llm.main --config=openrs
Default job: SmolLM2-135M-Instruct on short sums. The right number is the verifiable rubric, the bare number a
guardrail, and beside them each reply is compared with the next of its group, and so with two: the judge (any
chat-completions server: base_url, model) drafts criteria for the pair, then says which reply each criterion prefers.
Numbers: weights, number of opponents and of criteria are ours. Reconstructed from the abstract, without the refinement
of principles. Where rows have worked answers, reference=True compares with these instead. Learning rate and batch are
ours, for a 135M model on a laptop.
"""


def get_config():
  return dict(
    base='sums',
    rewards=dict(
      workers=8,
      deadline_s=330.0,
      parts=(
        dict(fn='bare_number', weight=0.1),
        dict(
          fn='pairwise',
          most_criteria=3,
          base_url='http://localhost:8000/v1',
          model='judge',
          cache='runs/judge.sqlite',
          give_up_s=300.0,
        ),
      ),
    ),
  )
