"""Answer odds (no paper: ours): prompts are chosen by how likely the policy finds their known answers.

python -m jaxrl_llm.main --config=answer_odds
Numbers: all are ours. The odds of a row's answer as the whole completion, in the words of recent right completions
("The answer is 5." or "2 + 3 = 5"), join the features of hidden_state.py, whose settings these are otherwise. Each step
encodes 4 times as many prompts as it samples, since 8 times as many cost twice as much for a few more mixed groups.
Candidates are those that the last step encoded, as older odds are of an older policy. The choice is sharp, of
temperature 0.05, since predictions differ within a kind. Where completions reason first, no words are those of many
prompts, and the odds are not read; where completions are shorter than prompts, encoding takes much of a step.
"""


def get_config():
  return dict(
    base='hidden_state',
    curriculum=dict(
      candidates=dict(fn='encoded'),
      prior_pooling=dict(answer_tokens=16, multiple=4),
      selection=dict(temperature=0.05),
    ),
  )
