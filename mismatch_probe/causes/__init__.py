"""The catalogue of causes: an entry holds each cause's wire name, kind, sentence, fix, and the tests that recognise it.

`comparison.Code` are the causes of a mismatch, `training.EndCause` what ends a training run, `findings.LogCode` what a
log shows before any number is computed, `findings.HeadroomCode` whether a checkpoint fits FP16. Beside the entries
stands the order in which their tests are tried.
"""
