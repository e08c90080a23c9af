"""LLMs Encode Their Failures, arXiv:2602.09924: difficulty predicted from the policy's hidden state of the prompt.

python -m jaxrl_llm.main --config=hidden_state
Numbers: all are ours. The paper fits a linear probe offline; here a logistic one learns online, as the prior of each
prompt's posterior (online prediction across prompts: arXiv:2602.01970). Each step encodes its own prompts and 8 times
as many others. All other settings are those of dapo.py.
"""


def get_config():
  return dict(
    base='dapo',
    curriculum=dict(
      prior_pooling=dict(
        fn='hidden_state',
        dimensions=16,
        multiple=8,
        ridge=1.0,
        strength=2.0,
        visits=20.0,
        memory=2000.0,
      ),
    ),
  )
