"""Keep the messages of sessions: in the process, and in a store that other processes read, too."""
