"""A folder for each feature that the cluster can do without.

A feature's folder holds all of it: what clients send, what a gateway and a group do for it, its
command, its pages. It may import the rest of `quire.cluster`. Nothing there imports a feature, but
for the imports that `tests/test_features.py` lists until they are cut.
"""
