"""A folder for each feature that the cluster can do without.

A feature's folder holds all of it: what clients send, what a gateway and a group do for it, its
command, its pages. It may import the rest of `quire.cluster` but `tools`. Nothing there imports a
feature, but for the imports that `tests/test_features.py` lists until they are cut: what a gateway
needs of a feature is an entry of `installed`, whose fields are those of `quire.cluster.seams`.

A new feature is a folder and an entry of `installed`; its command is a line in
`quire.cluster.cli.commands`.
"""
