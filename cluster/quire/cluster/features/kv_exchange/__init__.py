"""Groups that fetch blocks of KV cache from each other.

Its modules:

    exchange, gateway_warming    at a gateway: which groups lend to each other, and new groups
    peers                        a group's part: it lends and borrows
    lending, listener            blocks that others fetch
    borrowing, connection        blocks that are fetched; `peer_links` and `frames` below
    warming                      a new group's first blocks
"""
