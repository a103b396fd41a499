"""Keep turns and indexes over a restart, and share them between servers.

``persistence``   moves finished turns to the store, loads stored turns, and follows what other servers write
``stored_turns``  puts stored turns into the cache, except those of sessions that are being erased
``turn_records``  a turn as the cache knows it and as a record of the store
``warm_restart``  the snapshot of the indexes, beside the store
``model_key``     the key of a model and its tokenizer, under which servers share what they store
"""
