"""What stands between two turns of a row: the words of the chat template, as ids, around what the environment said.

Nothing that was sampled is encoded again: an observation is encoded by itself, and its ids are appended.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from jaxrl_llm.types import UserError

_SAID, _SHOWN = '⟦said⟧', '⟦shown⟧'


class TurnTemplate(NamedTuple):
  """Token ids before and after an observation."""

  tokenizer: Any
  before: tuple[int, ...]
  after: tuple[int, ...]
  most: int  # tokens of an observation; 0: as many as there are

  def ids(self, observation: str, last: int) -> list[int]:
    """What follows a turn whose last token was `last`; the template's end of a turn is not said twice.

    Special tokens that the observation spells are characters in it. Source: none.
    """
    before = self.before[1:] if self.before and self.before[0] == last else self.before
    shown = self.tokenizer.encode_plain(observation)
    return [*before, *(shown[: self.most] if self.most else shown), *self.after]


def build_turn_template(tokenizer: Any, chat: bool, role: str, most: int = 0) -> TurnTemplate:
  """By the difference of templates: what a chat has more, once a turn is said and a message of `role` answers it.

  Without `chat` observations stand between turns as they are. Raises UserError where the template refuses the role,
  or shows the messages in other words than theirs. Source: none.
  """
  if not chat:
    return TurnTemplate(tokenizer, (), (), most)
  told = [
    dict(role='user', content='?'),
    dict(role='assistant', content=_SAID),
    dict(role=role, content=_SHOWN),
  ]
  where = f'config.environment.role={role!r}'
  try:
    text = tokenizer.chat(told)
  except UserError as error:
    raise UserError(
      f'{where}: the chat template of config.model refuses an answer of that role ({error}).'
    ) from error
  _, said, rest = text.rpartition(_SAID)
  before, shown, after = rest.partition(_SHOWN)
  if not said or not shown:
    raise UserError(
      f'{where}: the chat template of config.model does not show a message of that role behind the turn that it '
      "answers; choose another role, such as 'user'."
    )
  return TurnTemplate(tokenizer, tuple(tokenizer.encode(before)), tuple(tokenizer.encode(after)), most)
