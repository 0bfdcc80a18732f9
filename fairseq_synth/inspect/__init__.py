"""Measures what attention has learned: ``python -m fairseq_synth.inspect CHECKPOINT... [--data BIN] --out DIR``.

===============  =====================================================================================
`attentions`     the attentions of a model, and their logits
`stand_ins`      the task of a checkpoint, on its data or on made-up dictionaries
`checkpoints`    loads a model, rebuilds its initial state, makes batches
`hooks`          reads logits in forward passes, removes and replaces heads, leaves branches out
`passes`         forward passes over data: what attentions compute in them, and the loss
`measure`        from tensors to figures
`positional`     attention by position, and the constant logits that come nearest to it
`words`          the loss with heads that look by position alone
`bleu`           BLEU of a translation model
`subject`        the model under inspection, its data and its figures so far
`parts`          what is measured on data, part by part
`analysis`       the inspection of one checkpoint: all parts
`summary`        the few figures that docs/analysis.md shows
`drawing`        pictures as plain values, and how they are drawn; needs matplotlib
`pictures`       the pictures of one model or of several
`output`         the folder that is written, file by file
`command`        the command line
===============  =====================================================================================
"""
