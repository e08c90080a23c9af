"""BranchGRPO, arXiv:2509.06040: rollouts fork in two at fixed tokens; advantages compare the nodes of a depth.

python -m jaxrl_llm.main --config=branch_grpo
Default job: SmolLM2-135M-Instruct on short sums. Written for images, whose denoising steps are the nodes of its trees;
here these are tokens.
Numbers: 16 rollouts that fork at 0, 3, 6 and 9 are the official script's, of 20 steps there and of 16 tokens here. Its
clip range of 0.001 is for denoising; clip and all other settings are those of dapo.py, without its length penalty.
Its pruned depths and widths, off by default, are left out.
"""


def get_config():
  return dict(
    base='dapo',
    rollouts=16,
    rollout=dict(tree=dict(fn='branch_grpo', splits=(0, 3, 6, 9))),
    objective=dict(
      advantage=dict(fn='raw'),
      credit_assignment=dict(fn='by_depth'),
      reward_shaping=dict(fn='none'),
    ),
  )
