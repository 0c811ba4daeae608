"""
Packing in trainers of transformers and TRL.

`unpad` lets a model compute no padding. `balance` cuts an optimizer step's rows by tokens.
`use_plan` makes a `Trainer` or `SFTTrainer` train the packs of a plan, in the order of its
schedule. Importing this module registers our attention, for
`from_pretrained(…, attn_implementation="packplan")`.
"""

from packplan.adapters.hf.attention import separate_samples
from packplan.adapters.hf.balance import balance
from packplan.adapters.hf.training import token_mean, use_plan
from packplan.adapters.hf.unpad import unpad
from packplan.adapters.loaders.batches import PackBatches
from packplan.adapters.loaders.rows import PACK, PackInputs, RowsOfPacks, flatten, learned, refuse_other_packs
