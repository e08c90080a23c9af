"""OpenRS, arXiv:2602.14069: a judge drafts criteria for pairs of completions under stated principles.

python -m jaxrl_llm.main --config=openrs
Default job: SmolLM2-135M-Instruct on short sums. The right number is the verifiable rubric and the bare number a
guardrail. Besides, each completion is compared with the next of its group, and so with two others: the judge (any
chat-completions server: base_url, model) drafts criteria for the pair, then names the completion that each criterion
prefers.
Numbers: weights, number of opponents and of criteria are ours. Reconstructed from the abstract, without the
refinement of principles. Where rows have worked answers, reference=True compares with these instead. Learning rate
and batch are ours, for a 135M model on a laptop.
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
