"""Ray and Serve around the engine: gateways, replica groups, the CLI."""
