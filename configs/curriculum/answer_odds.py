"""Answer odds (no paper: ours): prompts are chosen by how likely the policy finds their known answers.

python -m jaxrl_llm.main --config=answer_odds
Numbers: all are ours. The odds of a row's answer as the whole completion, in the words of recent right completions
("The answer is 5." or "2 + 3 = 5"), take the place of the states of hidden_state.py, which add nothing to them. Each
step encodes twice as many prompts as it samples: of 8 times as many, those of the most promising kinds, among which
are as many mixed groups as among 4 times as many of any kind. Candidates are those that the last step encoded, as older
odds are of an older policy. The choice is sharp, of temperature 0.05, since predictions differ within a kind. Where
completions reason first, no words are those of many prompts, and nothing is encoded; where completions are shorter than
prompts, encoding takes much of a step.
"""


def get_config():
  return dict(
    base='hidden_state',
    curriculum=dict(
      candidates=dict(fn='encoded'),
      prior_pooling=dict(dimensions=0, answer_tokens=16, multiple=2, considered=8),
      selection=dict(temperature=0.05),
    ),
  )
