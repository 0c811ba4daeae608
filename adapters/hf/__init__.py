"""
Trainers of transformers and TRL: `packplan.hf` has the names that scripts use.

`unpad` and `packed_calls` let a model compute no padding, `balance` cuts an optimizer step's rows
by tokens, and `following` makes any trainer train the packs of a schedule.
"""
