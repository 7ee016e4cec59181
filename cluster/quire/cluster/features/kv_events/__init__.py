"""``SubscribeKvEvents``: the cached blocks of groups, for routers of other projects."""
