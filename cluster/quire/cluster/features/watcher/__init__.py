"""A process beside each gateway that closes its listening sockets when it hangs."""
