"""
Proof that packed samples stay apart, for any torch model and a batch of any collator.

`batches` reads where samples begin, and cuts a packed batch into its samples. `comparison` computes
samples packed and alone, and compares both. `gradients` computes which samples a result depends on.
`modules` finds the first module that mixes samples, or whose result for a packed sample differs
from its result for the sample alone. `checks` has the two assertions on a batch, and `steps` the
one on the loss of a trainer's step. `packplan.testing` offers all three.
"""
