"""LoRA, arXiv:2106.09685: DAPO's objective; an adapter of rank 16 beside every matrix of a layer is trained, alone.

python -m jaxrl_llm.main --config=lora
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: rank and alpha are usual ones and ours; the paper adapts queries and values alone, and all matrices are what
most recipes take since. The learning rate is ten times that of all weights, the rest of the job is the same.
"""


def get_config():
  return dict(
    base='dapo',
    lora=dict(rank=16, alpha=32.0, targets='(q|k|v|o|gate|up|down)$'),
    optimizer=dict(learning_rate=1e-4),
  )
