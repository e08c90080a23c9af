"""DeReason, arXiv:2603.11193: easy rows are demonstrated in a supervised start, hard ones are left to RL.

python -m jaxrl_llm.main --config=dereason
Reconstructed from the abstract and a third party's summary: a language model scores the difficulty of every row from 1
to 5; rows of at most a threshold are demonstrations, the others prompts. Of your own file, with a column `difficulty`:
--config.data.source=jsonl --config.data.path=rows.jsonl --config.data.keep.column=difficulty --config.data.keep.above=3
--config.sft.keep.column=difficulty --config.sft.keep.at_most=3. Nothing here scores rows.
A later stage on harder rows alone is another run: --config.model=runs/exported, --config.sft.steps=0 and a higher
data.keep.above. Held-out rows have every difficulty.
Numbers: ours. Difficulty is the digits of a number in the default job: sums of one-digit numbers are demonstrated (by
their answers alone, because the rows have no reasoning), those of longer numbers are learned by DAPO.
"""


def get_config():
  return dict(
    base='dapo',
    sft=dict(
      steps=20,
      learning_rate=1e-5,
      prompts=16,
      keep=dict(fn='in_range', column='metadata.num_digits', at_most=1.0),
    ),
    data=dict(keep=dict(fn='in_range', column='metadata.num_digits', above=1.0)),
  )
