"""StepWiser, arXiv:2508.19229: a judge reasons about every step of a reply before it calls it sound or not.

python -m jaxrl_llm.main --config=stepwiser
Default job: SmolLM2-135M-Instruct on short sums; the right number is one reward, the share of sound steps another. The
judge is any chat-completions server (base_url, model). Numbers: the two rewards count alike, which is ours; the paper
teaches its own judge by RL and its policy to cut its reasoning into chunks, and judges chunks to choose among
rollouts. Here steps are cut at line ends and a served model judges them: reconstructed from the abstract and
third-party notes. For reasoning worth judging raise config.completion_tokens. Learning rate and batch are ours, for a
135M model on a laptop.
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
