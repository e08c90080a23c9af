"""Tree-OPO, arXiv:2509.09284: rollouts begin with up to ¾ of a known answer, compared with what such a start leads to.

python -m jaxrl_llm.main --config=tree_opo
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: reconstructed from summaries, without official code. Advantages without a division by the deviation, and the
mean over a subtree as its value, are the paper's. There the prefixes are steps of a teacher's tree search, and each is
completed once; here they are quarters of one right completion of the run, or of the answer in the data, completed
twice. Its projection onto orders of advantages, its correction for the teacher's sampling, and its distillation are
left out. All other settings are ours.
"""


def get_config():
  return dict(
    base='sums',
    prompts=16,
    rollouts=2,
    prompt_tokens=80,
    curriculum=dict(
      hint=dict(fn='stages', shares=(0.0, 0.25, 0.5, 0.75)),
      slots_per_prompt=4,
    ),
    objective=dict(
      advantage=dict(fn='staged', value='mean'),
      aggregation=dict(fn='token_mean'),
    ),
  )
