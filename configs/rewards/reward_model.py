"""RL from a learned reward: a reward model in a local folder scores whole conversations, on the host's CPU.

python -m jaxrl_llm.main --config=reward_model --config.rewards.folder=FOLDER   (from the repository's root)
FOLDER is a …ForSequenceClassification with one label, of a family that config.model supports, such as
Skywork/Skywork-Reward-V2-Qwen3-0.6B, downloaded before (huggingface-cli download NAME --local-dir FOLDER), or one
that --mode=reward_model trained on pairs (jaxrl_llm/models/README.md). It is checked before anything is compiled. The
conversation is rendered by its own chat template. Prompts are configs/rewards/unique_letters.jsonl, without answers;
your own: --config.data.path=rows.jsonl.
With mode=lag the host scores one batch while the device samples the next. One worker holds one float32 copy of the
weights: set memory_mb to three times their size, and deadline_s and cpu_s for all completions of a step or an
evaluation.
Rewards are the model's scores; the group's mean and deviation remove their scale. A completion counts as right, for
curriculum and log, from config.rewards.right up: set it by the scores that you see. A reward model can be exploited;
only the KL term (k3, coefficient 0.05) keeps the policy near its start. Numbers: ours, a starting point, not tuned
and not run with that model.
"""


def get_config():
  return dict(
    mode='lag',
    steps=60,
    prompts=4,
    rollouts=8,
    prompt_tokens=64,
    completion_tokens=128,
    objective=dict(
      advantage=dict(fn='group_normalized', eps=1e-6),
      kl=dict(fn='k3', coef=0.05),
      aggregation=dict(fn='token_mean'),
    ),
    optimizer=dict(learning_rate=1e-6),
    rewards=dict(
      fn='jaxrl_llm.models.reward_model:score',
      folder='runs/reward_model',
      batched='step',
      failed=dict(timeout='drop'),  # the host's doing and not the text's
      workers=1,
      memory_mb=16384,
      deadline_s=600.0,
      cpu_s=2400.0,
    ),
    data=dict(source='jsonl', path='configs/rewards/unique_letters.jsonl', answers=False),
    evaluation=dict(prompts=4, samples=4),
  )
