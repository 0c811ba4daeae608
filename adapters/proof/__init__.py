"""
Proof that packed samples stay apart, for any torch model and a batch from any collator.

`batches` finds where samples begin, and splits a packed batch into its samples. `comparison`
computes samples packed and alone, and compares the results. `gradients` computes the samples on
which a result depends. `modules` finds the first module that mixes samples, or whose result for a
packed sample differs from its result for the sample alone. `first_calls` and `passes` compare the
first calls of a model that uses `unpad` with padded passes. `checks` has two assertions on a batch,
and `steps` has an assertion on the loss of a trainer's step. `packplan.testing` exports these three
assertions.
"""
