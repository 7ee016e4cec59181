"""The live page at ``/ui``: what a gateway's requests and groups do at the moment."""
