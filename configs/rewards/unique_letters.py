"""TRL's first GRPO example: a dataset of prompts, and a user's reward function that counts different characters.

python -m jaxrl_llm.main --config=unique_letters         (from the root of the repository)
The function below has TRL's signature: lists of prompts and completions, every other column of the rows by its name,
and a list of numbers as result. Another one: --config.rewards.fn=my_module:my_function. Rows are
configs/rewards/unique_letters.jsonl, with the column `prompt` (text, or messages as here) and any columns of the
reward; data.source=files with 'hub:owner/name' works as well.
Numbers: no KL and the mean over tokens are TRL's (read in its guide); 8 rollouts, clip 0.2, learning rate 1e-6
decaying to 0, three epochs and 256 tokens are the defaults of its GRPOConfig (from memory); the model and 4 prompts a
step are ours, for a laptop. A completion counts as right, in the log only, from 30 different characters. Nothing is
held out or evaluated.
"""


def num_unique_letters(completions, **columns):
  """The number of different characters of each completion."""
  del columns
  return [float(len(set(completion[0]['content']))) for completion in completions]


def get_config():
  return dict(
    steps=18,
    prompts=4,
    rollouts=8,
    prompt_tokens=64,
    completion_tokens=256,
    objective=dict(
      advantage=dict(fn='group_normalized', eps=1e-4),
      trust_region=dict(fn='clip', low=0.2, high=0.2),
      aggregation=dict(fn='token_mean'),
    ),
    optimizer=dict(learning_rate=1e-6, decay='linear', b2=0.999),
    curriculum=dict(
      candidates=dict(fn='stream', multiple=1),
      evidence_decay=dict(fn='none'),
      prior_pooling=dict(fn='none'),
      utility=dict(fn='uniform'),
      eligibility=dict(fn='none'),
    ),
    rewards=dict(fn='configs.rewards.unique_letters:num_unique_letters', right=30.0),
    data=dict(source='jsonl', path='configs/rewards/unique_letters.jsonl', answers=False),
    evaluation=dict(prompts=0),
  )
