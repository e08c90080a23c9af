"""Tokenizers with their chat templates, from Hugging Face folders, GGUF metadata or an alphabet."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken, Regex, decoders, pre_tokenizers
from tokenizers import models as bpe

from jaxrl_llm.models import chat_template
from jaxrl_llm.models import tokenizer_backend as backends
from jaxrl_llm.models.model_folder import locate, read_json, read_text
from jaxrl_llm.types import JsonObject, UserError

# GGUF's names of the split that precedes byte-level BPE.
_QWEN2 = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
  r'|\s*[\r\n]+|\s+(?!\S)|\s+'
)
_LLAMA3 = _QWEN2.replace(r'|\p{N}|', r'|\p{N}{1,3}|')
_SPLITS = {'smollm': None, 'qwen2': _QWEN2, 'llama-bpe': _LLAMA3}

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5  # GGUF token types


class Tokenizer(NamedTuple):
  """Encodes, decodes, and renders chats. `end_ids` are all token ids that end a completion."""

  backend: tokenizers.Tokenizer
  template: str  # jinja2
  end_ids: tuple[int, ...]
  pad_id: int
  bos_token: str = ''
  eos_token: str = ''
  tools: tuple[JsonObject, ...] = ()  # that every chat offers, in OpenAI's form

  @property
  def vocab_size(self) -> int:
    return self.backend.get_vocab_size()

  def encode(self, text: str) -> list[int]:
    """Token ids. No special tokens are added; those spelled in the text are recognized.

    Raises UserError for text that is not valid Unicode.
    """
    with _user_errors(text):
      try:
        return self.backend.encode(text, add_special_tokens=False).ids
      except TypeError as error:
        raise UserError(f'the text {text[:80]!r} is no Unicode; remove lone surrogates.') from error

  def encode_plain(self, text: str) -> list[int]:
    """Token ids of untrusted text: special tokens spelled in it are encoded as plain characters."""
    self.backend.encode_special_tokens = True
    try:
      return self.encode(text)
    finally:
      self.backend.encode_special_tokens = False

  def decode(self, ids: list[int], skip_special: bool = True) -> str:
    """The text of token ids."""
    with _user_errors(ids):
      return self.backend.decode(ids, skip_special_tokens=skip_special)

  def token_texts(self) -> list[str]:
    """The text of each token, by id; '' for special tokens and '�' for incomplete characters."""
    # Each token is decoded after another one: some decoders drop a leading space of the first token.
    first = self.encode('a')[-1]
    prefix_chars = len(self.decode([first]))
    pairs = [[first, token] for token in range(self.vocab_size)]
    with _user_errors(pairs):
      texts = self.backend.decode_batch(pairs, skip_special_tokens=True)
    return [text[prefix_chars:] for text in texts]

  def chat(
    self,
    messages: Sequence[Mapping[str, object]],
    add_generation_prompt: bool = True,
    tools: Sequence[JsonObject] = (),
  ) -> str:
    """The chat template applied to `messages` (role, content) and `tools`, or else to the tokenizer's own tools.

    Raises UserError if the template raises.
    """
    variables: JsonObject = dict(bos_token=self.bos_token, eos_token=self.eos_token)
    if tools := tools or self.tools:  # undefined without: templates test it in several ways
      variables['tools'] = list(tools)
    try:
      return chat_template.render(
        self.template, list(messages), add_generation_prompt=add_generation_prompt, **variables
      )
    except ValueError as error:
      raise UserError(
        f'the chat template of config.model refuses the messages ({error}); change config.data, or set '
        'config.data.chat=False.'
      ) from error

  def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
    """Token ids of the rendered chat, up to the start of the assistant's turn."""
    return self.encode(self.chat(messages))


@contextlib.contextmanager
def _user_errors(value: str | list) -> Iterator[None]:
  """Convert errors of the library to UserError: exceptions, and panics, which derive from BaseException alone."""
  try:
    yield
  except UserError:
    raise
  except BaseException as error:
    if not isinstance(error, Exception) and type(error).__name__ != 'PanicException':
      raise
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    raise UserError(
      f'the tokenizer of config.model fails on {repr(value)[:80]} ({reason}); take another model.'
    ) from error


def from_folder(folder: str, model: JsonObject) -> Tokenizer:
  """Read tokenizer.json, tokenizer_config.json and chat_template.jinja of a Hugging Face folder.

  `model` is its config.json. Raises UserError for a missing or unusable tokenizer.
  """
  backend = _read_backend(folder)
  settings = read_json(folder, 'tokenizer_config.json')
  generation = read_json(folder, 'generation_config.json')
  token = lambda name: _content(settings.get(name))  # noqa: E731
  configured = [generation.get('eos_token_id'), model.get('eos_token_id')]
  ids = [i for e in configured for i in (e if isinstance(e, list) else [e]) if i is not None]
  ids += [backend.token_to_id(t) for t in (token('eos_token'), *_turn_ends(backend)) if t]
  ids = [i for at, i in enumerate(ids) if i is not None and i not in ids[:at]]
  if not ids:
    raise UserError(
      f'config.model={folder!r} names no end token; set eos_token_id in generation_config.json.'
    )
  pad = backend.token_to_id(token('pad_token')) if token('pad_token') else None
  tokenizer = Tokenizer(
    backend=backend,
    template=_template(folder, settings),
    end_ids=tuple(ids),
    pad_id=ids[0] if pad is None else pad,
    bos_token=token('bos_token'),
    eos_token=token('eos_token'),
  )
  return _validated(tokenizer, f'config.model={folder!r}')


def _read_backend(folder: str) -> tokenizers.Tokenizer:
  path = locate(folder, 'tokenizer.json')
  try:
    problem = backends.find_problem(path)
    if not problem:
      return backends.load(path)
  except BaseException as error:  # the library's panics are no Exception
    if isinstance(error, KeyboardInterrupt):
      raise
    raise UserError(
      f'config.model={folder!r}: tokenizer.json is missing or unreadable ({error}); '
      'save the fast tokenizer beside the weights.'
    ) from error
  raise UserError(
    f'config.model={folder!r}: tokenizer.json cannot be used: {problem}; take another model.'
  )


def from_gguf(fields: JsonObject, where: str) -> Tokenizer:
  """Build the byte-level BPE tokenizer described by a GGUF file's metadata.

  Raises UserError that begins with `where` for unsupported tokenizers and inconsistent metadata.
  """
  try:
    return _validated(_from_metadata(fields), where)
  except UserError:
    raise
  # Lists of other lengths or types, or merges of unknown tokens. The library may panic, which is no Exception.
  except BaseException as error:
    if isinstance(error, KeyboardInterrupt):
      raise
    raise UserError(
      f'{where}: its metadata describe no tokenizer ({type(error).__name__}: {error}); fetch the file again.'
    ) from error


def _from_metadata(fields: JsonObject) -> Tokenizer:
  kind, split = fields.get('tokenizer.ggml.model'), fields.get('tokenizer.ggml.pre')
  if kind != 'gpt2' or split not in _SPLITS:
    raise UserError(
      f'config.model: the GGUF tokenizer {kind!r}/{split!r} is not supported; supported: gpt2 with one of '
      f'{", ".join(_SPLITS)}; use a Hugging Face folder of the model instead.'
    )
  tokens, token_types = fields['tokenizer.ggml.tokens'], fields['tokenizer.ggml.token_type']
  merges = [tuple(m.split(' ')) for m in fields['tokenizer.ggml.merges']]
  vocab = {token: i for i, token in enumerate(tokens)}
  backend = tokenizers.Tokenizer(bpe.BPE(vocab, merges, ignore_merges=split == 'llama-bpe'))
  backend.pre_tokenizer = _pre_tokenizer(_SPLITS[split])
  backend.decoder = decoders.ByteLevel()
  for token, token_type in zip(tokens, token_types, strict=True):
    if token_type in (_CONTROL, _USER_DEFINED):
      backend.add_tokens([AddedToken(token, special=token_type == _CONTROL, normalized=False)])
  token_id = lambda name: fields.get(f'tokenizer.ggml.{name}_token_id')  # noqa: E731
  ends = [token_id('eos'), token_id('eot'), *map(backend.token_to_id, _turn_ends(backend))]
  ids = tuple(dict.fromkeys(i for i in ends if i is not None))
  return Tokenizer(
    backend=backend,
    template=fields.get('tokenizer.chat_template', chat_template.PLAIN),
    end_ids=ids,
    pad_id=token_id('padding') if token_id('padding') is not None else ids[0],
    bos_token=tokens[token_id('bos')] if token_id('bos') is not None else '',
    eos_token=tokens[token_id('eos')] if token_id('eos') is not None else '',
  )


def to_gguf(tokenizer: Tokenizer, vocab: int) -> JsonObject:
  """GGUF metadata of a byte-level BPE tokenizer: the inverse of `from_gguf`.

  `vocab` is the model's, whose ids beyond those of the tokenizer are unused. Raises UserError for other tokenizers.
  """
  described = json.loads(tokenizer.backend.to_str())
  model, split = described['model'], _split_name(described.get('pre_tokenizer'))
  if model['type'] != 'BPE' or split is None or model.get('byte_fallback'):
    raise UserError(
      'the tokenizer of config.model cannot be written to a GGUF file, which needs byte-level BPE with one of the '
      f'splits {", ".join(_SPLITS)}; write a Hugging Face folder instead: --to=FOLDER.'
    )
  names = [f'[UNUSED{i}]' for i in range(vocab)]
  kinds = [_UNUSED] * vocab
  for token, i in tokenizer.backend.get_vocab().items():
    names[i], kinds[i] = token, _NORMAL
  for added in described['added_tokens']:
    kinds[added['id']] = _CONTROL if added['special'] else _USER_DEFINED
  ids = dict(eos=tokenizer.end_ids[0], padding=tokenizer.pad_id)
  if tokenizer.eos_token:
    ids['eos'] = tokenizer.backend.token_to_id(tokenizer.eos_token)
  others = [i for i in tokenizer.end_ids if i != ids['eos']]
  ids |= dict(eot=others[0]) if others else {}
  bos = tokenizer.backend.token_to_id(tokenizer.bos_token) if tokenizer.bos_token else None
  ids |= {} if bos is None else dict(bos=bos)
  pair = lambda merge: merge if isinstance(merge, str) else ' '.join(merge)  # noqa: E731
  first = tokenizer.backend.encode('a', add_special_tokens=True).ids[0]
  return {
    'tokenizer.ggml.model': 'gpt2',
    'tokenizer.ggml.pre': split,
    'tokenizer.ggml.tokens': names,
    'tokenizer.ggml.token_type': kinds,
    'tokenizer.ggml.merges': [pair(merge) for merge in model['merges']],
    **{f'tokenizer.ggml.{name}_token_id': i for name, i in ids.items()},
    'tokenizer.ggml.add_bos_token': first == bos,
    'tokenizer.chat_template': tokenizer.template,
  }


def _split_name(described: JsonObject | None) -> str | None:
  """GGUF's name of a pre-tokenizer as the library describes it; None for one without a name."""
  for name, split in _SPLITS.items():
    backend = tokenizers.Tokenizer(bpe.BPE())
    backend.pre_tokenizer = _pre_tokenizer(split)
    if _steps(described) == _steps(json.loads(backend.to_str())['pre_tokenizer']):
      return name
  return None


def _steps(described: JsonObject | None) -> list[JsonObject]:
  """What each part of a pre-tokenizer does to a text; offsets do not matter."""
  if described is None:
    return []
  parts = described['pretokenizers'] if described['type'] == 'Sequence' else [described]
  return [{k: v for k, v in part.items() if k != 'trim_offsets'} for part in parts]


def characters(alphabet: str) -> Tokenizer:
  """One token per character of `alphabet`, after <end> (0) and <unknown> (1)."""
  special = ['<end>', '<unknown>']
  vocab = {t: i for i, t in enumerate([*special, *sorted(set(alphabet))])}
  backend = tokenizers.Tokenizer(bpe.WordLevel(vocab, unk_token='<unknown>'))
  backend.pre_tokenizer = pre_tokenizers.Split(Regex(r'[\s\S]'), 'isolated')
  backend.decoder = decoders.Fuse()
  backend.add_special_tokens(special)
  return Tokenizer(backend, chat_template.PLAIN, (0,), 0, '', '<end>')


def _pre_tokenizer(split: str | None) -> pre_tokenizers.PreTokenizer:
  if split is None:
    return pre_tokenizers.Sequence(
      [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
      ]
    )
  return pre_tokenizers.Sequence(
    [
      pre_tokenizers.Split(Regex(split), 'isolated'),
      pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
  )


def _turn_ends(backend: tokenizers.Tokenizer) -> list[str]:
  """The tokens in the vocabulary that close a chat turn."""
  return [
    t for t in ('<|im_end|>', '<|eot_id|>', '<|eom_id|>') if backend.token_to_id(t) is not None
  ]


def _template(folder: str, settings: JsonObject) -> str:
  template = read_text(folder, 'chat_template.jinja')
  if template is None:
    template = settings.get('chat_template') or chat_template.PLAIN
  if isinstance(template, list):  # several templates by name
    by_name = {t.get('name'): t.get('template') for t in template if isinstance(t, dict)}
    template = by_name.get('default', chat_template.PLAIN)
  return template


def _content(token: Any) -> str:
  text = token.get('content') if isinstance(token, dict) else token
  return text if isinstance(text, str) else ''


def _validated(tokenizer: Tokenizer, where: str) -> Tokenizer:
  """The tokenizer itself. Raises UserError for an unknown end or padding token and an unusable template."""
  vocabulary = set(tokenizer.backend.get_vocab().values())
  for name, ids in (('end', tokenizer.end_ids), ('padding', (tokenizer.pad_id,))):
    for token in ids:
      if isinstance(token, bool) or not isinstance(token, int) or token not in vocabulary:
        raise UserError(
          f'{where} names the {name} token {token!r}, which the tokenizer does not have; copy its files again.'
        )
  template = tokenizer.template
  if not isinstance(template, str):
    raise UserError(f'{where}: chat_template={template!r} must be text; copy it again.')
  special = dict(bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)
  if problem := chat_template.find_problem(template, **special):
    raise UserError(f'{where}: its chat template cannot be used: {problem}; take another model.')
  return tokenizer
