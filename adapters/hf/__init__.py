"""
Support for the trainers of transformers and TRL; scripts import it from `packplan.hf`.

`unpad` and `packed_calls` make a model skip padding. `balance` divides a step's rows into
microbatches by tokens. `training` and `following` make a trainer train the packs of a plan.
"""
