"""Restricts a server of Ray Serve to the address of its node.

Every Serve replica has a gRPC server for calls between deployments. It listens on all interfaces,
authenticates nobody, and unpickles its input: anyone who reaches it can run code here. Quire does
not use it (handles go through Ray), and Ray has no option to disable it or to set its address. So
where it asks for all interfaces it gets the node's address, which is the loopback in a cluster that
`quire serve` started.
"""

from quire.cluster.deploy.ray_private import ADD_PORT

_EVERYWHERE = "[::]:"


def keep_to_node_address() -> None:
    """Makes Serve listen on the node's address only. Call it at the begin of a replica's
    constructor: Serve opens the port when that has ended."""
    import ray

    add_port, replica = ADD_PORT.get(), ADD_PORT.owner()
    if add_port is None:
        return
    host = ray.util.get_node_ip_address()
    host = f"[{host}]" if ":" in host else host

    def add_port_at_node(server: object, address: str, *args: object, **kwargs: object) -> object:
        if address.startswith(_EVERYWHERE):
            address = f"{host}:{address.removeprefix(_EVERYWHERE)}"
        return add_port(server, address, *args, **kwargs)

    setattr(replica, ADD_PORT.name, add_port_at_node)
