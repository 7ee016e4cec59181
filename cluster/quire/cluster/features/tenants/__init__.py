"""Tenants: their API keys, limits, shares of the queue and the slots, and their usage.

Its modules:

    keys_file, command       the file of API keys, and ``quire keys``
    limits, metering         what a tenant may use, and counting it
    fair_queue, slot_shares  whose request is next, and who may take a slot
    usage, api               what each key has used, and ``GET /v1/usage``
"""
