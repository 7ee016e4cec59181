"""From logits to tokens: parameters, changes to logits, the draw, log-probabilities.

batch          what a step's samples are drawn with, as arrays that travel to the ranks
adjustments    what one request changes about its logits, kept up to date token by token
draw           the draw on a CPU
device         the same on a GPU, without waiting for it
head           what the model need not compute of the logits
logprobs       log-probabilities of the model
"""
