"""One completion of a request while it is sampled: its text, tokens and tool calls, as OpenAI's API writes them."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Sequence

from jaxrl_llm.environments.tool_format import ToolCall, ToolFormat
from jaxrl_llm.models.tokenizer import Tokenizer
from jaxrl_llm.serving.api import CHAT, ApiRequest
from jaxrl_llm.serving.engine import STOP, Delivery, Token
from jaxrl_llm.serving.text import CompletionText
from jaxrl_llm.types import JsonObject, JsonValue

_LEAST_LOGP = -9999.0  # JSON has no infinity


class Completion:
  """Collects deliveries of one row, and writes it as one choice, or as the deltas of a stream."""

  def __init__(
    self,
    request: ApiRequest,
    tokenizer: Tokenizer,
    texts: TokenTexts,
    index: int,
    prompt_ids: Sequence[int],
    tool_format: ToolFormat | None,
  ):
    """`index` of the choice. `tool_format`: None where no tools are offered."""
    self.index, self.prompt_ids, self.ended = index, prompt_ids, False
    self.tokens: list[Token] = []
    self._request, self._texts, self._format = request, texts, tool_format
    hold_from = '' if tool_format is None else tool_format.hold_from
    self._text = CompletionText(tokenizer, request.stops, hold_from, tool_format is not None)
    self.finish_reason: str | None = None  # None until the end
    self._calls: list[ToolCall] = []
    self._content = ''
    self._echo = tokenizer.decode(list(prompt_ids)) if request.echo else ''
    self._prompt: Sequence[Token] = ()  # scores of the prompt
    self._sent = 0  # tokens in deltas
    self._written = 0  # characters of the tokens whose offsets were returned
    self._first = True  # no delta was written

  def add(self, delivery: Delivery) -> str:
    """Adds tokens and returns the text that they complete. `ended` is set at the end, and by a stop string."""
    pieces = []
    if delivery.prompt is not None:
      self._prompt = delivery.prompt
    for place, token in enumerate(delivery.tokens):
      self.tokens.append(token)
      is_end = delivery.end == STOP and place == len(delivery.tokens) - 1
      pieces.append('' if is_end else self._text.push(token.id))
      if self._text.stopped:
        break
    if delivery.end or self._text.stopped:
      self.ended = True
      self.finish_reason = STOP if self._text.stopped else delivery.end
      before = self._text.text
      pieces.append(self._text.finish())
      self._find_calls()
      if self._calls:  # the held text is that of the calls
        pieces[-1] = self._content[len(before) :]
    else:
      self._content = self._text.text
    return ''.join(pieces)

  def _find_calls(self) -> None:
    self._content = self._text.text
    if self._format is None:
      return
    names = {tool['function']['name'] for tool in self._request.tools}
    self._content, self._calls = self._format.parse(self._content, names)
    if self._calls:
      self.finish_reason = 'tool_calls'

  def choice(self) -> JsonObject:
    """The whole completion as an element of `choices`."""
    choice: JsonObject = dict(index=self.index, finish_reason=self.finish_reason)
    if self._request.kind == CHAT:
      message: JsonObject = dict(role='assistant', content=self._content, refusal=None)
      if self._calls:
        message |= dict(content=self._content or None, tool_calls=self._tool_calls())
      choice['message'] = message
    else:
      choice['text'] = self._echo + self._content
    choice['logprobs'] = self._logprobs(self.tokens, self._echo_tokens())
    return choice | self._ids(self.tokens, first=True)

  def delta(self, text: str) -> JsonObject:
    """The part of the completion since the last call, with the `text` that `add` returned."""
    first, self._first = self._first, False
    tokens, self._sent = self.tokens[self._sent :], len(self.tokens)
    choice: JsonObject = dict(index=self.index, finish_reason=self.finish_reason)
    if self._request.kind == CHAT:
      delta: JsonObject = dict(role='assistant') if first else {}
      if text or (first and not self._calls):
        delta['content'] = text
      if self._calls:
        delta['tool_calls'] = [dict(index=i) | call for i, call in enumerate(self._tool_calls())]
      choice['delta'] = delta
    else:
      choice['text'] = (self._echo if first else '') + text
    choice['logprobs'] = self._logprobs(tokens, self._echo_tokens() if first else ())
    return choice | self._ids(tokens, first)

  def _echo_tokens(self) -> Sequence[Token]:
    return self._prompt if self._request.echo else ()

  def _tool_calls(self) -> list[JsonObject]:
    def written(call: ToolCall) -> JsonObject:
      arguments = json.dumps(call.arguments, ensure_ascii=False)
      return dict(
        id=f'call_{secrets.token_hex(12)}',
        type='function',
        function=dict(name=call.name, arguments=arguments),
      )

    return [written(call) for call in self._calls]

  def _ids(self, tokens: Sequence[Token], first: bool) -> JsonObject:
    """Token ids as sampled and their behavior log-probs, where they are wanted."""
    if not self._request.return_token_ids:
      return {}
    fields: JsonObject = dict(
      token_ids=[token.id for token in tokens],
      behavior_logprobs=[_finite(token.behavior_logp) for token in tokens],
    )
    return fields | (dict(prompt_token_ids=list(self.prompt_ids)) if first else {})

  def _logprobs(self, tokens: Sequence[Token], prompt: Sequence[Token]) -> JsonValue:
    top = self._request.top
    if top is None:
      return None
    if self._request.kind == CHAT:
      content = [
        self._entry(token.id, token.logp)
        | dict(top_logprobs=[self._entry(*pair) for pair in token.top[:top]])
        for token in tokens
      ]
      return dict(content=content, refusal=None)
    every = [*prompt, *tokens]
    return dict(
      tokens=[self._texts.name(token.id) for token in every],
      token_logprobs=[None if math.isnan(token.logp) else _finite(token.logp) for token in every],
      top_logprobs=[self._top(token, top) for token in every],
      text_offset=[self._offset(token) for token in every],
    )

  def _top(self, token: Token, top: int) -> JsonValue:
    """{text: log-prob} of the likeliest tokens and the token itself; of several with one text, the likeliest."""
    if math.isnan(token.logp):  # the first token of a prompt
      return None
    pairs: JsonObject = {}
    for number, logp in (*token.top[:top], (token.id, token.logp)):
      pairs.setdefault(self._texts.name(number), _finite(logp))
    return pairs

  def _offset(self, token: Token) -> int:
    """Where the next token begins in the text of the choice."""
    begin = self._written
    self._written += len(self._texts[token.id])
    return begin

  def _entry(self, token: int, logp: float) -> JsonObject:
    text, name = self._texts[token], self._texts.name(token)
    data = list(text.encode()) if name == text else None
    return dict(token=name, logprob=_finite(logp), bytes=data)


class TokenTexts:
  """The text of each token, by id; with '\\ufffd' where a token is a part of a character."""

  def __init__(self, tokenizer: Tokenizer):
    self._tokenizer, self._texts = tokenizer, dict[int, str]()
    # A token is decoded after another one: some decoders drop a space at the beginning.
    self._first = tokenizer.encode('a')[-1]
    self._first_chars = len(tokenizer.decode([self._first], False))

  def __getitem__(self, token: int) -> str:
    if token not in self._texts:
      text = self._tokenizer.decode([self._first, token], False)
      self._texts[token] = text[self._first_chars :]
    return self._texts[token]

  def name(self, token: int) -> str:
    """The text of a token; 'token_id:N' of a part of a character, as several have the same text."""
    text = self[token]
    return f'token_id:{token}' if '\ufffd' in text else text


def _finite(logp: float) -> float:
  return max(logp, _LEAST_LOGP)
