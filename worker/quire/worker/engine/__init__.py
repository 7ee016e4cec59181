"""The engine: takes requests, schedules steps of the model, and returns tokens."""
