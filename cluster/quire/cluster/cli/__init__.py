"""The command line: the commands that start and change a cluster, and what commands share.

It may import everything but `tools`. A new command is a line in `commands` and a function that adds
its flags; a client of a server belongs in `tools`, a feature's command in its folder.
"""
