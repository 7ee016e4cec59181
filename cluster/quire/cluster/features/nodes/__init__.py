"""The ranks of a group: where they run, and those that run on other nodes.

Its modules:

    placement                     which processes a group's ranks are
    rank_actors, remote_rank      a rank on another node, started by Ray
    remote_ranks, rank_socket     such ranks as a group's executor reaches them
"""
