"""``quire simulate``: flags and inputs of the simulator, `quire.simulate`."""
