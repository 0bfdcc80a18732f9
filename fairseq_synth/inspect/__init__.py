"""Measures what attention has learned: ``python -m fairseq_synth.inspect CHECKPOINT... [--data BIN] --out DIR``.

===============  =====================================================================================
`attentions`     the attentions of a model, and their logits
`stand_ins`      the task of a checkpoint, with the dictionaries of its data or with made-up ones
`checkpoints`    loads a model, rebuilds it as it was before its training, makes batches
`hooks`          reads logits in forward passes, removes and replaces heads, leaves branches out
`passes`         forward passes over data: what attentions compute in them, and the loss
`measure`        computes metrics of tensors
`positional`     attention by position, and the constant logits whose attention comes nearest to it
`words`          the loss with heads that look by position alone
`bleu`           BLEU of a translation model
`inspection`     the model under inspection, its data and its results so far
`results`        the type of results
`histograms`     histograms of the values of each attention
`parts`          what is measured on data, part by part
`analysis`       the inspection of one checkpoint: all parts
`summary`        the few results that docs/analysis.md shows
`drawing`        pictures as plain values, and how they are drawn; needs matplotlib
`pictures`       the pictures of one model or of several
`output`         the folder that is written, file by file
`arguments`      the flags of the command line; needs neither torch nor fairseq
`command`        what the command does
===============  =====================================================================================
"""
