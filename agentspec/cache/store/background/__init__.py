"""Use a store in threads, so that no decode path waits: a writer, a loader, a follower, and jobs."""
