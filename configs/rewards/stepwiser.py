"""StepWiser, arXiv:2508.19229: a judge reasons about every step of a completion before its verdict.

python -m jaxrl_llm.main --config=stepwiser
Default job: SmolLM2-135M-Instruct on short sums. The right number is one reward, the share of sound steps another.
The judge is any chat-completions server (base_url, model).
Numbers: equal weights of the two rewards are ours. The paper trains its own judge by RL and its policy to split its
reasoning into chunks, and uses verdicts on chunks to choose among rollouts. Here steps end at line ends and a served
model judges them: reconstructed from the abstract and third-party notes. For longer reasoning raise
config.completion_tokens. Learning rate and batch are ours, for a 135M model on a laptop.
"""


def get_config():
  return dict(
    base='sums',
    rewards=dict(
      workers=8,
      deadline_s=330.0,
      parts=(
        dict(
          fn='steps',
          cut=r'\n',
          most_steps=4,
          base_url='http://localhost:8000/v1',
          model='judge',
          cache='runs/judge.sqlite',
          give_up_s=300.0,
        ),
      ),
    ),
  )
