"""From logits to tokens: the draw, log-probabilities.

draw           sampling on a CPU
device         sampling on a GPU, without waiting for it
head           avoids computing logits that sampling does not need
logprobs       log-probabilities of the model
"""
