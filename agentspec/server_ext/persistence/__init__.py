"""Keep turns and indexes over a restart, and share them between servers.

``persistence``   finished turns to the store, stored turns to the cache, what other servers wrote
``turn_records``  a turn as the cache knows it and as a record of the store
``warm_restart``  the snapshot of the indexes, beside the store
``model_key``     the key of a model and its tokenizer, under which servers share what they store
"""
