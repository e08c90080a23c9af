"""SCOPE, arXiv:2602.24110: a wrong rollout is completed anew from its first wrong step, and learned in its group.

python -m jaxrl_llm.main --config=scope
Default job: SmolLM2-135M-Instruct on short sums. The judge is any chat-completions server (base_url, model); for longer
reasoning raise config.completion_tokens, and config.prompt_tokens with it.
Numbers: reconstructed from the abstract and third-party notes; no code is public. There a process reward model finds
the first wrong step of a largely correct rollout, a stronger source corrects it from there, and the policy learns both
parts in the same step. Here a served model judges steps, which end at line ends. The policy itself continues the sound
part in the next step, with the demonstration in its prompt, and its first right continuation counts. The ratio of each
token is to the policy that sampled it: the sound part to that of the first step, the rest to that of the second with
the demonstration. Only groups without a right rollout are corrected, one row each; the verdicts are no reward. All
other settings are those of dapo.py.
"""


def get_config():
  return dict(
    base='dapo',
    prompt_tokens=112,
    curriculum=dict(hint=dict(fn='corrected', part='steps', least=0.0, guided=True)),
    rewards=dict(
      workers=8,
      deadline_s=330.0,
      parts=(
        dict(
          fn='steps',
          weight=0.0,
          combine='before_error',
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
