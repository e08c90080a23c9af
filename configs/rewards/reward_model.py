"""RL from a learned reward: a reward model in a local folder grades whole conversations, on the host's CPU.

python -m jaxrl_llm.main --config=reward_model --config.rewards.folder=FOLDER   (from the repository's root)
FOLDER is one of …ForSequenceClassification with one label, of a family that config.model may be of: such as
Skywork/Skywork-Reward-V2-Qwen3-0.6B, fetched before (huggingface-cli download NAME --local-dir FOLDER). What is wrong
with it is told before anything compiles. Its own chat template tells it the conversation. Prompts are
configs/rewards/unique_letters.jsonl, which have no answers; of your own: --config.data.path=rows.jsonl.
With mode=lag the host rates one batch while the device samples the next. One worker holds one copy of the weights in
float32: give memory_mb three times their size, and deadline_s and cpu_s for all replies of a step or an evaluation.
Rewards are the model's numbers as they are: a group's mean and deviation take their scale away. "Right", which only
curriculum and log know, is a number from config.rewards.right up: set that by what the model says. It can be flattered;
nothing here but the KL term (k3, coefficient 0.05) holds the policy near its beginning. Numbers: ours, a job to begin
from, not tuned and not run with that model.
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
