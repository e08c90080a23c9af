"""FiMi-RM, arXiv:2505.12843: rewards minus what their length alone predicts.

python -m jaxrl_llm.main --config=fimi_rm
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: a reconstruction. The paper fits a small network to the scores of a reward model and trains that against it;
here a parabola is fitted to the rewards of each minibatch and subtracted. The degree 2 and the strength 1 are ours.
Learning rate and batch are ours, for a 135M model on a laptop.
"""


def get_config():
  return dict(
    base='sums',
    objective=dict(reward_shaping=dict(fn='length_fitted', degree=2, strength=1.0)),
  )
