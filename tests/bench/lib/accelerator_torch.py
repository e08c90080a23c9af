"""The torch arm of accelerator.py: transformers' Qwen3 with random weights samples and learns the same batch.

accelerator_torch.py CASE TOKENS: one JSON line. Weights and AdamW's moments are bfloat16 but for a float32 copy of the
weights, attention is that of scaled_dot_product_attention, activations are recomputed, and a micro-batch has 8 rows:
the settings of TRL's GRPOTrainer without an inference server. Only TOKENS of each completion are sampled; the time of
all is theirs times the ratio, which is too little, as later tokens attend to more.
"""

from __future__ import annotations

import json
import sys
import time

import torch
import transformers

from tests.bench import slices

ROWS = 8  # of a micro-batch
CASES = {'tiny': (2, 2, 16, 32), '0.6b': (8, 8, 512, 1024), '1.7b': (8, 8, 512, 1024)}


def make_model(name: str, device: str):
  """Random weights in float32; products run in bfloat16 by autocast."""
  shape = slices.SHARED | slices.SIZES[name]
  config = transformers.Qwen3Config(**{k: v for k, v in shape.items() if k != 'model_type'})
  with torch.device(device):
    model = transformers.Qwen3ForCausalLM(config)
  return model.to(torch.float32)


def sample_seconds(model, prompts, tokens: int) -> float:
  """Of `tokens` tokens for each row, with weights in bfloat16, after a short call."""
  policy = model.to(torch.bfloat16)
  mask = torch.ones_like(prompts)
  for count in (4, tokens):
    _wait()
    began = time.perf_counter()
    with torch.inference_mode():
      options = dict(do_sample=True, temperature=1.0, top_k=0, min_new_tokens=count)
      policy.generate(
        prompts, attention_mask=mask, max_new_tokens=count, pad_token_id=0, eos_token_id=None,
        **options,
      )  # fmt: skip
    _wait()
    took = time.perf_counter() - began
  return took


def learn_seconds(model, rows, prompt_tokens: int) -> float:
  """Of one update on all rows, the second one."""
  model.gradient_checkpointing_enable()
  model.train()
  optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=rows.is_cuda)
  advantages = torch.randn(len(rows), 1, device=rows.device)
  for _ in range(2):
    _wait()
    began = time.perf_counter()
    for start in range(0, len(rows), ROWS):
      part, advantage = rows[start : start + ROWS], advantages[start : start + ROWS]
      with torch.autocast(rows.device.type, torch.bfloat16):
        keep = part.shape[1] - prompt_tokens + 1
        logits = model(part, logits_to_keep=keep, use_cache=False).logits[:, :-1]
      picked = part[:, prompt_tokens:, None]
      logp = torch.log_softmax(logits.float(), -1).gather(-1, picked)[..., 0]
      (-(torch.exp(logp - logp.detach()) * advantage).mean() * len(part) / len(rows)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    _wait()
    took = time.perf_counter() - began
  return took


def _wait() -> None:
  if torch.cuda.is_available():
    torch.cuda.synchronize()


def main(name: str, tokens: str) -> None:
  P, G, L, T = CASES[name]
  device = 'cuda' if torch.cuda.is_available() else 'cpu'
  model, vocab = make_model(name, device), slices.SHARED['vocab_size']
  prompts = torch.randint(0, vocab, (P, L), device=device).repeat_interleave(G, 0)
  rows = torch.cat([prompts, torch.randint(0, vocab, (P * G, T), device=device)], 1)
  update_s = learn_seconds(model, rows, L)
  count = min(int(tokens), T)
  sampled_s = sample_seconds(model, prompts, count)
  found = dict(
    update_s=update_s, sampled=count, sampled_s=sampled_s, rollout_s=sampled_s * T / count
  )
  print(json.dumps(found | dict(torch=torch.__version__, transformers=transformers.__version__)))


if __name__ == '__main__':
  main(*sys.argv[1:])
