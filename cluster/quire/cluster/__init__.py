"""The cluster around the engine, on Ray Serve: gateways, replica groups and the CLI."""
