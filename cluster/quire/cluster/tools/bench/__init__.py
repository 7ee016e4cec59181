"""``quire bench``: measures engines and groups in this process, and any server."""
