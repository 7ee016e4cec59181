"""Commands that are clients of a server, or work without one: nothing that serves imports them.

A tool is a module, or a folder with a module ``command``, and has its line in
`quire.cluster.cli.commands`, by whose name it is imported when it is called. Tools may import
everything.
"""
