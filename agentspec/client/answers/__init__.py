"""Turn what a server answers into replies, whole or streamed, and record them."""
