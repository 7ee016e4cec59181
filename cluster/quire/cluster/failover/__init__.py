"""One completion's life: routed, relayed, and resumed where its group is lost."""
