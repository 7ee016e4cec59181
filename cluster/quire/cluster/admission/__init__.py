"""Which requests a gateway takes, which wait, and which are refused at once."""
