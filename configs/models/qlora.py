"""QLoRA, arXiv:2305.14314: DAPO's objective; an adapter is trained over frozen kernels in 4 bits (NF4).

python -m jaxrl_llm.main --config=qlora
Default job: SmolLM2-135M-Instruct on short sums. A larger model for a small device: --config.model=Qwen/Qwen3-1.7B;
--mode=layout prints the memory of weights and optimizer.
Numbers: NF4 with a float32 scale for 64 inputs is the paper's, without its second quantization of the scales. The
paper adapts all matrices, too; rank, alpha and learning rate are those of lora.py, and ours.
"""


def get_config():
  return dict(
    base='lora',
    lora=dict(base_dtype='nf4'),
  )
