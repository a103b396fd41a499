"""Keep turns and indexes over a restart, and share them between servers.

``persistence``        moves finished turns to the store, loads stored turns, and follows what other servers write
``stored_turns``       puts stored turns into the cache, except those of sessions that are being erased
``turn_records``       a turn as the cache knows it and as a record of the store
``warm_restart``       the snapshot of the indexes, beside the store
``snapshot_erasures``  removes from a loaded snapshot what was erased since
``model_key``          the key of a model and its tokenizer, under which servers share what they store

To *erase* a session means everywhere, to *forget* it from this process's memory. Who holds text or names of a session,
and which call removes them, in the order of an erasure on request (`SessionAdmin`, `Persistence.erase`):

    thread    held in                              removed by
    engine    turns on their way into the cache    StoredTurns.begin_erasure
              turns that wait for the store        BackgroundWriter.forget
              turns that the loader has read       BackgroundLoader.forget
              figures, running requests            SessionHolder.forget_session
    job       the cache                            SuffixCache.remove_session
              traces of others' requests           SessionHolder.forget_drafts
              snapshots                            SessionHolder.delete_snapshots
              turns on their way to the store      BackgroundWriter.forget, which waits for them
              the store, and other processes       OwnErasures.erase_session, which leaves a tombstone
              turns that were read meanwhile       BackgroundLoader.forget

The follower's thread applies the tombstones of other processes (`Persistence._forget_session`). If a turn of this
process came to the store behind such a tombstone, it erases the session again (`Persistence.erase_again`).
"""
