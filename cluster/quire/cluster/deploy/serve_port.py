"""Keeps a server of Ray Serve's own to the address of its node.

Every Serve replica has a gRPC server for calls between deployments. It listens on all interfaces,
authenticates nobody, and unpickles its input: anyone who reaches it can run code here. Ours is
not called over it (handles go through Ray), and Ray can neither leave it out nor be told an address
for it; so where it asks for all interfaces it is given the node's own, which is the loopback for
a cluster that `quire serve` started.
"""

from quire.cluster.deploy.ray_private import ADD_PORT

_EVERYWHERE = "[::]:"


def keep_to_node_address() -> None:
    """Has Serve listen on the node's address only. Call it as a replica's constructor begins: Serve
    opens the port when that has ended."""
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
