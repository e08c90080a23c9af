"""Token ids between two turns of a row: the chat template's text around an observation.

Sampled tokens are not encoded again: an observation is encoded by itself, and its ids are appended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from jaxrl_llm.types import UserError

if TYPE_CHECKING:  # the module imports jax, which environment workers must not
  from jaxrl_llm.models.tokenizer import Tokenizer

_TURN, _OBSERVATION = '⟦turn⟧', '⟦shown⟧'  # placeholders in a rendered chat


class TurnTemplate(NamedTuple):
  """Token ids before and after an observation."""

  tokenizer: Tokenizer
  before: tuple[int, ...]
  after: tuple[int, ...]
  max_tokens: int  # of an observation, which is truncated; 0: no limit

  def ids(self, observation: str, last: int) -> list[int]:
    """Token ids to append to a turn whose last token is `last`; the template's end of turn is not repeated.

    Special tokens that are spelled in the observation are encoded as plain characters.
    """
    before = self.before[1:] if self.before and self.before[0] == last else self.before
    content = self.tokenizer.encode_plain(observation)
    return [*before, *(content[: self.max_tokens] if self.max_tokens else content), *self.after]


def build_turn_template(
  tokenizer: Tokenizer, chat: bool, role: str, max_tokens: int = 0
) -> TurnTemplate:
  """The template's text around a message of `role` that follows a turn, found by rendering a chat with placeholders.

  Without `chat`, observations are appended as they are. Raises UserError where the template rejects the role, or does
  not contain the messages verbatim.
  """
  if not chat:
    return TurnTemplate(tokenizer, (), (), max_tokens)
  messages = [
    dict(role='user', content='?'),
    dict(role='assistant', content=_TURN),
    dict(role=role, content=_OBSERVATION),
  ]
  where = f'config.environment.role={role!r}'
  try:
    text = tokenizer.chat(messages)
  except UserError as error:
    raise UserError(
      f'{where}: the chat template of config.model refuses an answer of that role ({error}).'
    ) from error
  _, turn, rest = text.rpartition(_TURN)
  before, observation, after = rest.partition(_OBSERVATION)
  if not turn or not observation:
    raise UserError(
      f'{where}: the chat template of config.model does not show a message of that role behind the turn that it '
      "answers; choose another role, such as 'user'."
    )
  return TurnTemplate(
    tokenizer, tuple(tokenizer.encode(before)), tuple(tokenizer.encode(after)), max_tokens
  )
