"""What attention has learned: ``python -m fairseq_synth.inspect CHECKPOINT... [--data BIN] --out DIR``.

===============  =====================================================================================
`measure`        from tensors to figures; knows neither fairseq nor files
`checkpoints`    loads a model, rebuilds its initial state, makes batches
`hooks`          finds the attentions of a model, reads their logits, switches heads and branches off
`analysis`       every figure of one checkpoint, as plain values
`pictures`       the pictures of these values, as plain values too
`comparison`     the pictures that compare several models, as plain values too
`drawing`        draws such pictures, and those of the results; needs matplotlib
`command`        the command line
===============  =====================================================================================
"""
