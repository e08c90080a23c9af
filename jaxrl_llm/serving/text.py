"""The text of a completion while its tokens arrive: incremental decoding, stop strings, text that is held back."""

from __future__ import annotations

from collections.abc import Sequence

from jaxrl_llm.models.tokenizer import Tokenizer

_INCOMPLETE = '\ufffd'  # what decoders make of the first bytes of a character


class CompletionText:
  """Text pieces of one completion. Their concatenation is `text`, whatever the sizes of the pieces."""

  def __init__(
    self,
    tokenizer: Tokenizer,
    stops: Sequence[str] = (),
    hold_from: str = '',
    keep_special: bool = False,
  ):
    """`hold_from`: from its first occurrence on, text comes with the last piece only. `keep_special`: in the text."""
    self._tokenizer, self._skip_special = tokenizer, not keep_special
    self._stops, self._hold_from = tuple(stops), hold_from
    self._ids: list[int] = []
    # Tokens before `_context` are decoded for good; those from there to `_decoded` are decoded again, because some
    # decoders drop a space at the beginning.
    self._context = self._decoded = 0
    self._pending = ''  # decoded, and not yet in a piece
    self.text = ''  # of all pieces
    self.stopped = False  # a stop string was found; it is not part of the text

  def push(self, token: int) -> str:
    """The piece of text that is complete with this token; '' where more tokens may change it."""
    if self.stopped:
      return ''
    self._ids.append(token)
    self._pending += self._decode_new(final=False)
    return self._take(final=False)

  def finish(self) -> str:
    """The last piece."""
    if not self.stopped:
      self._pending += self._decode_new(final=True)
    return self._take(final=True)

  def _decode_new(self, final: bool) -> str:
    decode = self._tokenizer.decode
    old = decode(self._ids[self._context : self._decoded], self._skip_special)
    text = decode(self._ids[self._context :], self._skip_special)
    if text.endswith(_INCOMPLETE) and not final:
      return ''
    if len(text) > len(old):
      self._context, self._decoded = self._decoded, len(self._ids)
    return text[len(old) :]

  def _take(self, final: bool) -> str:
    """Removes from the pending text what may be sent."""
    if not self.stopped:
      found = [(self._pending.find(stop), len(stop)) for stop in self._stops]
      # The first to be complete counts, however the text is cut into tokens.
      first = min(((at + size, at) for at, size in found if at >= 0), default=None)
      if first is not None:
        self._pending, self.stopped = self._pending[: first[1]], True
    ready = len(self._pending)
    if not final:
      marks = (*(() if self.stopped else self._stops), *filter(None, [self._hold_from]))
      ready -= max((_overlap(self._pending, mark) for mark in marks), default=0)
      held = self._pending.find(self._hold_from) if self._hold_from else -1
      ready = min(ready, held) if held >= 0 else ready
    piece, self._pending = self._pending[:ready], self._pending[ready:]
    self.text += piece
    return piece


def _overlap(text: str, mark: str) -> int:
  """The length of the longest end of `text` with which `mark` begins, without being complete."""
  lengths = range(min(len(mark) - 1, len(text)), 0, -1)
  return next((n for n in lengths if text.endswith(mark[:n])), 0)
