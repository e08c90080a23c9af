"""Prompts and completions in the tokens of a teacher with another tokenizer, and the spans that both share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxrl_llm import data
from jaxrl_llm.config.schema import Config
from jaxrl_llm.models import token_spans
from jaxrl_llm.models.tokenizer import Tokenizer
from jaxrl_llm.objective import distillation
from jaxrl_llm.types import Prompts, Rollout, Row, TeacherTokens, UserError

_FIELD, _CHECKED_ROWS = 'config.objective.teacher', 64


def is_used(config: Config) -> bool:
  """Whether the teacher reads text in tokens of its own."""
  return config.objective.distillation.fn == distillation.on_policy_spans.__name__


class _Encoded(NamedTuple):
  """A completion in the tokens of both."""

  span_N: np.ndarray  # int32, of each of the policy's tokens
  ids_M: list[int]  # the teacher's tokens in spans
  span_M: np.ndarray


class TeacherText:
  """Encodes a step for the teacher."""

  def __init__(
    self, config: Config, policy: Tokenizer, teacher: Tokenizer, rows: Sequence[Row]
  ) -> None:
    """`rows` are those that `Prompts.index_P` numbers.

    Raises UserError for a prompt that is too long for the teacher, and for tokenizers that do not spell the text that
    they encode.
    """
    self._group, self._sizes = config.rollouts, config.objective.distillation
    self._policy, self._teacher = policy, teacher
    _check_spelling(config, policy, teacher, rows)
    self._policy_V, self._teacher_V = map(token_spans.token_bytes, (policy, teacher))
    try:
      self._prompts = [data.encode(row, config.data, teacher) for row in rows]
      self._end = _turn_end(teacher, config.data.chat)
    except UserError as error:
      raise UserError(str(error).replace('config.model', _FIELD)) from error
    _check_lengths(self._prompts, self._sizes['teacher_prompt_tokens'])

  def build(self, prompts: Prompts, rollout: Rollout) -> tuple[TeacherTokens, dict[str, float]]:
    """The teacher's tokens of a graded step, and metrics of the spans."""
    rows = zip(rollout.tokens_BxT, rollout.length_B, strict=True)
    encoded = [self._encode(tokens[:length].tolist()) for tokens, length in rows]
    width, T = self._sizes['teacher_completion_tokens'], rollout.tokens_BxT.shape[1]
    asked = [self._prompts[i] for i in np.repeat(prompts.index_P, self._group)]
    tokens = TeacherTokens(
      *data.pad_rows(asked, self._sizes['teacher_prompt_tokens']),
      *data.pad_rows([np.asarray(x.ids_M, np.int32) for x in encoded], width),
      _padded([x.span_M for x in encoded], width),
      _padded([x.span_N for x in encoded], T),
    )
    aligned, spans = (tokens.own_span_BxT >= 0).sum(), tokens.own_span_BxT.max(1) + 1
    metrics = {
      'distillation/aligned': float(aligned / max(rollout.length_B.sum(), 1)),
      'distillation/span_tokens': float(aligned / max(spans.sum(), 1)),
    }
    return tokens, metrics

  def _encode(self, ids: list[int]) -> _Encoded:
    """A completion's spans: of its text before bytes that are no UTF-8, or that the teacher spells otherwise."""
    end = ids[-1] if ids and ids[-1] in self._policy.end_ids else None
    pieces = [_piece(self._policy_V, i) for i in (ids if end is None else ids[:-1])]
    raw = b''.join(pieces)
    theirs = self._teacher.encode(token_spans.valid_text(raw))
    their_pieces = [_piece(self._teacher_V, i) for i in theirs]
    stop = token_spans.common_bytes(raw, b''.join(their_pieces))
    sizes_N, sizes_M = list(map(len, pieces)), list(map(len, their_pieces))
    if end is not None:  # a span of its own behind the text; its length is that of no text
      sizes_N, sizes_M = [*sizes_N, 1], [*sizes_M, 1]
      theirs, stop = [*theirs, self._end_of(end)], stop + (stop == len(raw))
    most = self._sizes['teacher_completion_tokens']
    theirs, sizes_M = theirs[:most], sizes_M[:most]
    span_N, span_M = token_spans.align(np.asarray(sizes_N, int), np.asarray(sizes_M, int), stop)
    count = int((span_M >= 0).sum())
    return _Encoded(span_N, theirs[:count], span_M[:count])

  def _end_of(self, token: int) -> int:
    """The teacher's end token of the same name, else the one that ends its turns."""
    name = self._policy.backend.id_to_token(token)
    same = self._teacher.backend.token_to_id(name) if name else None
    return same if same in self._teacher.end_ids else self._end


def _piece(bytes_V: list[bytes], token: int) -> bytes:
  return bytes_V[token] if token < len(bytes_V) else b''  # a row of the vocabulary without a token


def _padded(spans: Sequence[np.ndarray], width: int) -> np.ndarray:
  padded = np.full((len(spans), width), -1, np.int32)
  for row, span in zip(padded, spans, strict=True):
    row[: len(span)] = span
  return padded


def _turn_end(tokenizer: Tokenizer, chat: bool) -> int:
  """The end token behind an assistant's message in the chat template; the first one without such a template."""
  messages = [dict(role='user', content='a'), dict(role='assistant', content='a')]
  ids = tokenizer.encode(tokenizer.chat(messages, add_generation_prompt=False)) if chat else []
  return next((i for i in reversed(ids) if i in tokenizer.end_ids), tokenizer.end_ids[0])


def _check_lengths(prompts: Sequence[np.ndarray], most: int) -> None:
  longest = max(map(len, prompts), default=0)
  if longest > most:
    raise UserError(
      f'config.objective.distillation.teacher_prompt_tokens={most} is too small: in the tokens of '
      f'{_FIELD} the longest prompt has {longest}; raise it to that.'
    )


def _check_spelling(
  config: Config, policy: Tokenizer, teacher: Tokenizer, rows: Sequence[Row]
) -> None:
  """Raises UserError where the tokens of no row's text spell it; a space before the policy's is accepted."""
  texts = [f'{data.prompt_text(row, config.data)}\n{row.answer}' for row in rows[:_CHECKED_ROWS]]
  for field, tokenizer in (('config.model', policy), (_FIELD, teacher)):
    bytes_V = token_spans.token_bytes(tokenizer)
    spelled = [b''.join(_piece(bytes_V, i) for i in tokenizer.encode(text)) for text in texts]
    if field == 'config.model':
      spelled = [x.removeprefix(b' ') for x in spelled]
    if all(x != text.encode() for x, text in zip(spelled, texts, strict=True)):
      raise UserError(
        f'{field}: its tokens spell {spelled[0][:40]!r} where the text is {texts[0].encode()[:40]!r}, so that no span '
        f'of text is shared; name another {"model" if field == "config.model" else "teacher"}.'
      )
