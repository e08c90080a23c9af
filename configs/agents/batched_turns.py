"""Guess a number while others wait for their answers: a row decodes its next turn as soon as it has one.

python -m jaxrl_llm.main --config=batched_turns
Rows whose turn is over wait for the environment, and the rest decode on; a call returns once a quarter of the rows
wait (EnvPool's first M of N, arXiv:2206.10558). It pays where environments take as long as a turn does.
"""


def get_config():
  return dict(base='guess', environment=dict(batching=dict(fn='turns')))
