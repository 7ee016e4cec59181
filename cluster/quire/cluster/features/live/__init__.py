"""The live page at ``/ui``: what a gateway's requests and groups do at the moment.

`live` collects what happens, `rows` and `series` are what a viewer gets, `api` serves it with the
page in `ui/`, which is made of `cluster/ui`.
"""
