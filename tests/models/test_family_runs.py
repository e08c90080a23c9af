"""DAPO by the real command on folders of random models, one of each kind: a shared expert, sinks, latents,
layers with other sizes."""

from __future__ import annotations

import pytest
import tiny_job

from jaxrl_llm.models import tokenizer

torch = pytest.importorskip('torch')
transformers = pytest.importorskip('transformers')

_SIZES = dict(
  vocab_size=97,
  hidden_size=32,
  num_hidden_layers=3,
  num_attention_heads=2,
  num_key_value_heads=1,
  max_position_embeddings=128,
  num_experts_per_tok=2,
)
MODELS = {
  # A dense layer among mixtures whose tokens share an expert; sampling's experts are replayed.
  'Qwen2Moe': dict(
    _SIZES,
    num_experts=4,
    moe_intermediate_size=16,
    shared_expert_intermediate_size=24,
    intermediate_size=48,
    mlp_only_layers=[1],
  ),
  # Windows shorter than rows, sinks, biases everywhere.
  'GptOss': dict(_SIZES, num_local_experts=4, intermediate_size=32, head_dim=16, sliding_window=5),
  # Latents in the cache, groups of experts.
  'DeepseekV3': dict(
    _SIZES | dict(num_key_value_heads=2),
    n_routed_experts=4,
    moe_intermediate_size=16,
    intermediate_size=48,
    first_k_dense_replace=1,
    n_group=2,
    topk_group=1,
    kv_lora_rank=12,
    q_lora_rank=8,
    qk_rope_head_dim=8,
    qk_nope_head_dim=8,
    v_head_dim=16,
  ),
  # Three layers with states, then attention; fewer slots than rows, so that slots change hands.
  'Qwen3_5': dict(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    max_position_embeddings=128,
    linear_num_key_heads=1,
    linear_num_value_heads=2,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
  ),
  # Heads of two sizes, values that are keys, windows shorter than rows, experts beside a dense MLP.
  'Gemma4': dict(
    {k: v for k, v in _SIZES.items() if k != 'num_experts_per_tok'},
    num_hidden_layers=4,
    num_key_value_heads=2,
    intermediate_size=24,
    head_dim=8,
    global_head_dim=16,
    num_global_key_value_heads=1,
    attention_k_eq_v=True,
    sliding_window=5,
    layer_types=['sliding_attention', 'full_attention'] * 2,
    hidden_size_per_layer_input=0,
    enable_moe_block=True,
    num_experts=4,
    top_k_experts=2,
    moe_intermediate_size=16,
  ),
}


SETTINGS = {
  'Qwen2Moe': dict(learner=dict(replay_experts=True)),
  # Both passes round kernels to 8 bits.
  'DeepseekV3': dict(rollout=dict(windows=2)),
  'Qwen3_5': dict(rollout=dict(slots=8)),
  'Gemma4': dict(rollout=dict(slots=8, windows=2)),
  'GptOss': dict(rollout=dict(weights_dtype='int8'), learner=dict(quantize=True)),
}


@pytest.mark.parametrize('kind', MODELS)
def test_dapo_trains_samples_and_exports(kind, tmp_path):
  torch.manual_seed(0)
  text = 'Text' if kind in ('Qwen3_5', 'Gemma4') else ''
  config = getattr(transformers, f'{kind}{text}Config')(**MODELS[kind], eos_token_id=0)
  folder = tmp_path / 'model'
  model = getattr(transformers, f'{kind}ForCausalLM')(config)
  model.save_pretrained(folder)
  characters = ''.join(chr(c) for c in range(32, 127))
  tokenizer.characters(characters).backend.save(str(folder / 'tokenizer.json'))
  made = tiny_job.config_file(
    tmp_path,
    base='dapo',
    model=str(folder),
    scratch=None,
    steps=3,
    prompt_tokens=80,
    **SETTINGS[kind],
    **tiny_job.UNTAUGHT,
  )
  tiny_job.finish(tiny_job.start(made, str(tmp_path / 'run')))
  metrics = tiny_job.rows(tmp_path / 'run')
  assert len(metrics) == 3
  # Sampling and the update agree on the probability of every token, with a cache and without.
  gaps = [row['training/rollout_probs_diff_max'] for row in metrics[1:]]
  assert max(gaps) < 1e-4, gaps
  exported = str(tmp_path / 'exported')
  flags = ['--mode=export', f'--to={exported}', '--dtype=float32']
  tiny_job.finish(tiny_job.start(made, str(tmp_path / 'run'), *flags))
  trained = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
  moved = [
    float((a - b).detach().abs().max())
    for a, b in zip(model.parameters(), trained.parameters(), strict=True)
  ]
  assert max(moved) > 0
