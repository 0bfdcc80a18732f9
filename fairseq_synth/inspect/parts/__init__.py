"""The parts of an inspection on data, which ``--only`` chooses from.

==============  =======================================================================
`attention`     logits, attention weights and their singular values
`layers`        rank of the layers
`heads`         importance of heads, loss and BLEU without them
`words`         loss with heads that look by position alone
`lengths`       loss and BLEU by sentence length
==============  =======================================================================

Each has a function `measure`, which adds its results to an `Inspection`, and `describe_cost`, which returns how much
`measure` computes.
"""
