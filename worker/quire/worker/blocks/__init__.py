"""What is known of blocks outside an engine: their names, their events, and the format in which
they are exchanged. With a request's errors and outputs, it is all of the worker that the router
imports."""
