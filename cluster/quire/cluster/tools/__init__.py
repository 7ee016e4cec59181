"""Commands that are clients of a server, or work without one: nothing that serves imports them.

They may import everything. A tool is a module, or a folder with a module `command`, and has a line
in `quire.cluster.cli.commands`, which imports it by name when it is called.
"""
