"""Keep the logs in Redis, on one server, behind Sentinel or in a Cluster: `store.RedisStore`."""
