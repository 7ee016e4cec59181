"""LoRA adapters: loaded at gateways by name, given to groups, run with requests.

Its modules:

    api, command     loading and unloading over HTTP, and ``quire adapter``
    catalog, keeper  the names that a gateway's clients can use, which all gateways agree on
    node, files      adapters on a gateway's node, and how their files travel
    groups           which groups hold which adapter, as a gateway knows it
    group            the adapters that one group can run
"""
