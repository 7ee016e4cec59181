"""A replica group: its engine, its ranks wherever they run, and its service for gateways."""
