"""DARS, arXiv:2508.13755: groups with a success rate below one half count as much as a group with one half.

python -m jaxrl_llm.main --config=dars
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: 8 rollouts and at most four times the weight of a group are the official code's 8 and 32 (its ET schedule;
advantage.fn=hardness_weighted is HW, 8 and 64), as is the advantage without a standard deviation. The paper samples
more rollouts; here the existing ones count more. Zero-variance groups leave the loss, as there. Learning rate and
batch are ours, for a 135M model on a laptop.
"""


def get_config():
  return dict(
    base='sums',
    objective=dict(
      advantage=dict(fn='equal_treatment', most=4.0),
      zero_variance=dict(fn='mask'),
    ),
  )
