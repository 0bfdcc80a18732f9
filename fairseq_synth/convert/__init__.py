"""From a trained Transformer to a Synthesizer: ``python -m fairseq_synth.convert CHECKPOINT --data BIN --out NEW.pt``.

===============  ============================================================================
`conversion`     which heads get which function, and what the model allows
`heads`          replaces heads in the state dict of a model
`model`          builds the new model, and writes its checkpoint
`tuning`         the command that continues the training of the new model
`arguments`      the flags of the command line; needs neither torch nor fairseq
`command`        what the command does
===============  ============================================================================
"""
