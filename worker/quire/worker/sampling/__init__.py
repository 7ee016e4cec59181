"""From logits to tokens: parameters, changes to logits, the draw, log-probabilities.

adjustments    one request's changes to its logits, updated token by token
draw           sampling on a CPU
device         sampling on a GPU, without waiting for it
head           avoids computing logits that sampling does not need
logprobs       log-probabilities of the model
"""
