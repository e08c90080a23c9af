"""LoRA, arXiv:2106.09685: DAPO's objective; only an adapter of rank 16 on every matrix of a layer is trained.

python -m jaxrl_llm.main --config=lora
Default job: SmolLM2-135M-Instruct on short sums.
Numbers: rank and alpha are common ones and ours. The paper adapts only queries and values; most recipes since adapt
all matrices. The learning rate is ten times that of full training, and the rest of the job is the same.
"""


def get_config():
  return dict(
    base='dapo',
    lora=dict(rank=16, alpha=32.0, targets='(q|k|v|o|gate|up|down)$'),
    optimizer=dict(learning_rate=1e-4),
  )
