"""What a request is: its parameters, limits, outputs and errors, and an engine's settings. Imports
neither torch nor gRPC."""
