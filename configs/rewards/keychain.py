"""Chains of keys in a long text, after LoongRL's KeyChain (arXiv:2510.19363): follow the keys to the question.

python -m jaxrl_llm.main --config=keychain
  --config.model=Qwen/Qwen2.5-7B-Instruct        (the paper's; any model of README.md that reads 5,120 tokens)
A text of some 3,000 to 4,000 tokens (by SmolLM2's tokenizer) holds 64 facts, as many false leads, and filler. One of
four chains of three to six UUIDs leads to the question, which asks for the sum of two to four facts; the other chains
lead to other questions. Facts and text are generated: the paper hides questions of data sets in 16,384 tokens of
their documents, and trains in stages with other data beside.
Longer: --config.prompt_tokens=16384 and --config.data.tasks="[{'name': 'keychain', 'facts': 96, 'filler': 1000,
'min_links': 4, 'max_links': 10, 'distractors': 5, 'min_hops': 2, 'max_hops': 4}]" make 11,000 to 13,000 tokens; where
these need too much memory, --config.mesh.context divides those of a row among devices.
Numbers: ours, a starting point, not tuned and not run: DAPO's clip and token mean, no KL, 8 rollouts of 1,024 tokens.
The curriculum separates numbers of links and hops. A small version for a laptop, in tens of seconds:
--config.model=scratch --config.data.tasks="[{'name': 'keychain', 'key_letters': 2, 'facts': 2, 'filler': 0}]".
"""


def get_config():
  return dict(
    model='Qwen/Qwen2.5-7B-Instruct',
    steps=200,
    prompts=32,
    rollouts=8,
    prompt_tokens=4096,
    completion_tokens=1024,
    objective=dict(
      advantage=dict(fn='group_normalized', eps=1e-6),
      trust_region=dict(fn='clip', low=0.2, high=0.28),
      aggregation=dict(fn='token_mean'),
      zero_variance=dict(fn='mask'),
    ),
    optimizer=dict(learning_rate=1e-6),
    rewards=dict(fn='number', workers=2, deadline_s=10.0),
    data=dict(
      source='puzzles',
      size=4096,
      tasks=(
        dict(
          name='keychain',
          min_links=3,
          max_links=6,
          distractors=3,
          facts=64,
          filler=180,
          min_hops=2,
          max_hops=4,
        ),
      ),
    ),
    evaluation=dict(every=50, prompts=64, samples=0),
    checkpoint=dict(every=50, keep=2),
  )
