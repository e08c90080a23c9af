"""The decoder against transformers in float32: the same files give the same logits."""

from __future__ import annotations

import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import models
from jaxrl_llm.models import decoder, huggingface, shared_prompt_forward, tensor_layout
from jaxrl_llm.types import Prompts

torch = pytest.importorskip('torch')
transformers = pytest.importorskip('transformers')

from tests.models import torch_float64  # noqa: E402

SIZES = dict(
  vocab_size=97,
  hidden_size=48,
  intermediate_size=80,
  num_hidden_layers=3,
  num_attention_heads=4,
  num_key_value_heads=2,
  max_position_embeddings=256,
)
_LLAMA3 = dict(
  rope_type='llama3',
  factor=8.0,
  low_freq_factor=1.0,
  high_freq_factor=4.0,
  original_max_position_embeddings=16,
)
_YARN = dict(rope_type='yarn', factor=4.0, original_max_position_embeddings=16)
_EXPERTS = dict(head_dim=16, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=24)
_GEMMA = dict(head_dim=16, sliding_window=5, query_pre_attn_scalar=24, tie_word_embeddings=True)
_LOCAL = dict(
  full_attention=dict(rope_type='linear', factor=2.0, rope_theta=1e5),
  sliding_attention=dict(rope_type='default', rope_theta=100.0),
)

CASES = {
  'llama': ('Llama', dict()),
  'llama-tied': ('Llama', dict(tie_word_embeddings=True)),
  'llama-biases': ('Llama', dict(attention_bias=True, mlp_bias=True)),
  'llama-linear': (
    'Llama',
    dict(rope_parameters=dict(rope_type='linear', factor=2.0, rope_theta=1e4)),
  ),
  'llama-llama3': ('Llama', dict(rope_parameters=dict(_LLAMA3, rope_theta=5e5))),
  'llama-yarn': ('Llama', dict(rope_parameters=dict(_YARN, rope_theta=1e4))),
  'qwen2': ('Qwen2', dict()),
  'qwen2-tied': ('Qwen2', dict(tie_word_embeddings=True)),
  'qwen3': ('Qwen3', dict(head_dim=16)),
  'qwen3-tied-biases': ('Qwen3', dict(head_dim=24, tie_word_embeddings=True, attention_bias=True)),
  'mistral-window': ('Mistral', dict(sliding_window=5)),
  'qwen2-window': ('Qwen2', dict(use_sliding_window=True, sliding_window=4, max_window_layers=1)),
  'qwen3_moe': ('Qwen3Moe', dict(_EXPERTS, norm_topk_prob=True)),
  'qwen3_moe-window': ('Qwen3Moe', dict(_EXPERTS, use_sliding_window=True, sliding_window=6)),
  'smollm3': ('SmolLM3', dict(num_hidden_layers=5, pad_token_id=None, attention_bias=True)),
  'olmo2': ('Olmo2', dict(pad_token_id=None)),
  'gemma2': ('Gemma2', dict(_GEMMA, attn_logit_softcapping=2.0, final_logit_softcapping=3.0)),
  'gemma3': ('Gemma3', dict(_GEMMA, num_hidden_layers=7, rope_parameters=_LOCAL)),
}
DECODED = 'llama-llama3', 'qwen3-tied-biases', 'qwen3_moe', 'smollm3', 'olmo2', 'gemma2', 'gemma3'


def reference(kind, changes):
  torch.manual_seed(0)
  text = 'Text' if kind in ('Gemma3', 'Gemma4', 'Llama4', 'Qwen3_5', 'Qwen3_5Moe') else ''
  config = getattr(transformers, f'{kind}{text}Config')(**(SIZES | changes))
  config._attn_implementation = 'eager'  # the other implementations ignore caps
  model = getattr(transformers, f'{kind}ForCausalLM')(config).eval()
  with torch.no_grad():  # at their initial 0 and 1, wrong biases and norms would not be detected
    for name, parameter in model.named_parameters():
      if parameter.ndim == 1 or name.endswith('_bias'):  # those of all experts are one matrix
        parameter.add_(0.3 * torch.randn_like(parameter))
      else:  # the delta rule magnifies roundings: at 4, those of transformers alone move logits by 1.6e-5
        parameter.mul_(2.0 if kind.startswith(('Qwen3Next', 'Qwen3_5')) else 4.0)
      if kind == 'Gemma4' and 'q_norm' in name:  # learned norms, and no 1 / √d, keep scores small
        parameter.mul_(0.3)
      # As in released files. 1 + the weight of a norm, which both sides compute, has no rounding then.
      parameter.copy_(parameter.bfloat16())
    for name, buffer in model.named_buffers():
      if name.endswith(('e_score_correction_bias', 'layer_scalar')):
        buffer.add_(0.3 * torch.randn_like(buffer))
  return model


def padded(left, seed=0):
  """Tokens and mask of 4 sequences of 1 to 40 tokens, padded with token 5 on one side."""
  r = np.random.default_rng(seed)
  length = np.array([40, 7, 1, 23])
  column = np.arange(40)
  mask = column >= 40 - length[:, None] if left else column < length[:, None]
  return np.where(mask, r.integers(0, 97, (4, 40)), 5).astype(np.int32), mask


def their_logits(model, tokens, mask):
  torch_float64.rounded_once(model)
  with torch.no_grad():
    positions = np.maximum(mask.cumsum(1) - 1, 0)
    out = model(
      torch.tensor(tokens, dtype=torch.long),
      attention_mask=torch.tensor(mask, dtype=torch.long),
      position_ids=torch.tensor(positions),
    )
  return out.logits.numpy()


@pytest.mark.parametrize('case', CASES)
def test_logits_equal_those_of_transformers(case, tmp_path):
  kind, changes = CASES[case]
  model = reference(kind, changes)
  model.save_pretrained(tmp_path, max_shard_size='60KB')
  assert len([f for f in os.listdir(tmp_path) if f.endswith('.safetensors')]) > 1, 'sharded'
  config, _ = huggingface.read_config(str(tmp_path))
  params = huggingface.load_params(str(tmp_path), config)
  assert config.tied == model.config.tie_word_embeddings
  for left in (True, False):
    tokens, mask = padded(left)
    ours = np.asarray(
      jax.jit(lambda p, t, m: decoder.forward(config, p, t, m))(params, tokens, mask)
    )
    gap = np.abs(ours - their_logits(model, tokens, mask))[mask].max()
    assert gap <= 1e-4, gap


@pytest.mark.parametrize(
  'case', ['llama-llama3', 'qwen3-tied-biases', 'qwen3_moe', 'smollm3', 'olmo2', 'gemma2', 'gemma3']
)
def test_decoding_with_a_cache_equals_the_full_pass_of_transformers(case, tmp_path):
  """Right-padded prompts are prefilled once, then given tokens are decoded one at a time."""
  kind, changes = CASES[case]
  model = reference(kind, changes)
  model.save_pretrained(tmp_path)
  config, _ = huggingface.read_config(str(tmp_path))
  params = huggingface.load_params(str(tmp_path), config)
  tokens, mask = padded(left=False)
  start, T = np.array([30, 4, 1, 20]), 6
  prompts = Prompts(tokens[:, :32], start.astype(np.int32), *[np.arange(4, dtype=np.int32)] * 3)
  forced = np.random.default_rng(1).integers(0, 97, (4, T)).astype(np.int32)
  prompt_cache, last = shared_prompt_forward.prefill(config, params, prompts, 'float32')
  own = [(jnp.zeros((4, config.kv_heads, T, config.head_dim)),) * 2 for _ in range(config.layers)]
  real = np.arange(32)[None] < start[:, None]

  @jax.jit
  def step(token, t, own):
    hidden, own, _ = decoder.apply(
      config, params, token, (start + t)[:, None], jnp.broadcast_to(jnp.arange(T) <= t, (4, 1, T)),
      shared=(prompt_cache, real), cache=own, at=t, key_positions_BxS=start[:, None] + np.arange(T),
    )  # fmt: skip
    return decoder.head(config, params, hidden[:, 0]), own

  steps = [decoder.head(config, params, last)]
  for t in range(T - 1):
    logits, own = step(forced[:, t : t + 1], t, own)
    steps.append(logits)
  for b in range(4):
    row = np.concatenate([tokens[b, : start[b]], forced[b]])[None]
    theirs = their_logits(model, row, np.ones_like(row, bool))[0]
    for t in range(T):
      np.testing.assert_allclose(steps[t][b], theirs[start[b] - 1 + t], atol=1e-4)


@pytest.fixture(scope='session')
def smollm2():
  return models.load('smollm2-135m')


def smollm2_reference(model):
  c = model.config
  config = transformers.LlamaConfig(
    vocab_size=c.vocab, hidden_size=c.width, intermediate_size=c.mlp, num_hidden_layers=c.layers,
    num_attention_heads=c.heads, num_key_value_heads=c.kv_heads, rms_norm_eps=c.norm_eps,
    rope_parameters=dict(rope_type='default', rope_theta=c.rope_theta),
    max_position_embeddings=c.max_tokens, tie_word_embeddings=True,
  )  # fmt: skip
  theirs = transformers.LlamaForCausalLM(config).eval()
  state = {}
  for path, value in jax.tree_util.tree_leaves_with_path(model.params):
    name = '/'.join(str(k.key) for k in path)
    state[tensor_layout.hugging_face_name(name, c)] = torch.tensor(
      value.T if name.endswith('kernel') else value
    )
  state['lm_head.weight'] = state['model.embed_tokens.weight']
  theirs.load_state_dict(state)
  return theirs


def test_smollm2_from_gguf_gives_the_logits_of_transformers(smollm2):
  """Both get the dequantized weights; the decoded word checks the dequantization itself.

  Both compute in float64: with logits up to 38, rounding in float32 depends on the processor and reaches 1.7e-4.
  """
  theirs = smollm2_reference(smollm2).double()
  ids = smollm2.tokenizer.encode_chat([dict(role='user', content='What is the capital of France?')])
  row = np.array([ids], np.int32)
  sides = ((0, 0), (9, 0)), ((0, 0), (0, 9))
  tokens = np.concatenate([np.pad(row, side, constant_values=2) for side in sides])
  mask = np.array([[0] * 9 + [1] * len(ids), [1] * len(ids) + [0] * 9], bool)
  fn = lambda p: decoder.forward(smollm2.config, p, tokens, mask, dtype='float64')  # noqa: E731
  with jax.enable_x64():
    ours = np.asarray(jax.jit(fn)(smollm2.params))
  gap = np.abs(ours - their_logits(theirs, tokens, mask))[mask].max()
  assert gap <= 1e-4, gap
  text = smollm2.tokenizer.decode([int(ours[0, -1].argmax())])
  assert text == 'The'


def test_smollm2_config_and_special_tokens(smollm2):
  assert smollm2.config.layers == 30 and smollm2.config.tied and smollm2.config.kv_heads == 3
  assert smollm2.tokenizer.end_ids == (2,) and smollm2.tokenizer.pad_id == 2


def _texts():
  """200 texts: unicode, code, white space, numbers, and special tokens written out."""
  fixed = [
    'Hello world', '  leading', 'trailing  ', 'a\n\n\nb', '\t\ttabs\t', 'naïve café — “quotes” …',
    '日本語のテキスト', 'Привет, мир', 'مرحبا بالعالم', '😀👩‍👩‍👧‍👦🇫🇷', 'e\u0301 vs é', 'x=1;y=2', '3.14159',
    '1234567890', '12 + 345 = 357', '<|im_start|>user\nhi<|im_end|>', '<|im_end|><|im_end|>',
    'text<|endoftext|>more', '<|im_start|', "don't we'll I'M they'd", 'def f(x):\n    return x**2  # ok',
    '{"a": [1, 2, {"b": null}]}', 'SELECT * FROM t WHERE a>=10;', '\\frac{1}{2} $x^2$', 'a' * 300, '', ' ',
    '\u200b\ufeff', '\x00\x01', 'ＦＵＬＬ', 'x\r\ny',
  ]  # fmt: skip
  r = np.random.default_rng(0)
  pool = 'abc XYZ 0123456789 \n\t.,;:!?()[]{}<>|/\\_-+=*&^%$#@~`\'"éßñ中文字русскийعربي😀🚀'
  words = ['<|im_start|>', '<|im_end|>', 'the', ' of', '\n    ', '12', ' 345', 'import', '==', '🙂']
  drawn = []
  while len(fixed) + len(drawn) < 200:
    n = int(r.integers(1, 40))
    text = ''.join(r.choice(list(pool), n)) if len(drawn) % 2 else ''.join(r.choice(words, n))
    drawn.append(text)
  return fixed + drawn


def test_token_ids_equal_the_reference_tokenizer_on_200_texts(smollm2, tmp_path):
  """The reference is built by transformers from the same vocabulary with the model card's recipe.

  (Digits one by one, then byte-level BPE. Converting the GGUF with transformers leaves the digits out.)
  """
  from tokenizers import Tokenizer, decoders, pre_tokenizers
  from tokenizers import models as bpe

  backend = json.loads(smollm2.tokenizer.backend.to_str())
  reference = Tokenizer(
    bpe.BPE(backend['model']['vocab'], [tuple(m) for m in backend['model']['merges']])
  )
  reference.pre_tokenizer = pre_tokenizers.Sequence(
    [
      pre_tokenizers.Digits(individual_digits=True),
      pre_tokenizers.ByteLevel(add_prefix_space=False),
    ]
  )
  reference.decoder = decoders.ByteLevel()
  special = [t['content'] for t in backend['added_tokens']]
  theirs = transformers.PreTrainedTokenizerFast(
    tokenizer_object=reference, additional_special_tokens=special, eos_token='<|im_end|>'
  )
  theirs.chat_template = smollm2.tokenizer.template
  texts = _texts()
  assert len(texts) == 200
  for text in texts:
    assert smollm2.tokenizer.encode(text) == theirs.encode(text, add_special_tokens=False), repr(
      text
    )
    messages = [dict(role='user', content=text)]
    want = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert smollm2.tokenizer.chat(messages) == want
  conversation = [
    dict(role='system', content='Be brief.'),
    dict(role='user', content='2+2?'),
    dict(role='assistant', content='4'),
  ]
  want = theirs.apply_chat_template(conversation, tokenize=False)
  assert smollm2.tokenizer.chat(conversation, add_generation_prompt=False) == want


def test_a_folder_tokenizer_equals_transformers(smollm2, tmp_path):
  """tokenizer.json, several end tokens and a template in its own file, read back from a folder."""
  from jaxrl_llm.models import tokenizer

  smollm2.tokenizer.backend.save(str(tmp_path / 'tokenizer.json'))
  (tmp_path / 'chat_template.jinja').write_text(smollm2.tokenizer.template)
  (tmp_path / 'tokenizer_config.json').write_text(
    json.dumps({'eos_token': '<|im_end|>', 'bos_token': '<|im_start|>'})
  )
  (tmp_path / 'generation_config.json').write_text(json.dumps({'eos_token_id': [0, 2]}))
  ours = tokenizer.from_folder(str(tmp_path), {'eos_token_id': 2})
  theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
  assert ours.end_ids == (0, 2)
  messages = [dict(role='user', content='Zwölf 12 <|im_end|>')]
  got = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
  assert ours.encode_chat(messages) == theirs.encode(got, add_special_tokens=False)
