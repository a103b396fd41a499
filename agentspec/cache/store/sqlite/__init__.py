"""Keep the logs in an SQLite file, or in memory: `store.SQLiteStore`, `store.MemoryStore`."""
