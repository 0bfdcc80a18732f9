"""What attention has learned: ``python -m fairseq_synth.inspect CHECKPOINT... [--data BIN] --out DIR``.

===============  =====================================================================================
`measure`        from tensors to figures; knows neither fairseq nor files
`checkpoints`    loads a model, rebuilds its initial state, makes batches
`hooks`          finds the attentions of a model, reads their logits, switches heads and branches off
`passes`         forward passes over data: what attentions compute in them, and the loss
`words`          attention by position, and the loss with heads that have no more than that
`analysis`       every figure of one checkpoint, as plain values
`pictures`       the pictures of these values, of one model or of several, as plain values too
`drawing`        draws such pictures, and those of the results; needs matplotlib
`command`        the command line
===============  =====================================================================================
"""
